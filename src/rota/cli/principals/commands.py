"""Typer commands of `rota principals`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import typer

from rota.cli.core.options import OutputOption, load_settings
from rota.cli.core.output_format import OutputFormat
from rota.cli.quota.options import NewName, command_group

if TYPE_CHECKING:
    from rota.cli.core.tables import CliPage
    from rota.server.access import PrincipalStore

principals_app = command_group(
    "People and services that API keys belong to.\n\n"
    "Approvals and policies compare principals: two keys of one principal are one person. A name is never changed or "
    "given to another principal."
)


@principals_app.command("list")
def principals_list(context: typer.Context, form: OutputOption = OutputFormat.TEXT) -> None:
    """List principals, also disabled ones."""
    from rota.cli.principals import actions as principals_actions

    _print(context, form, principals_actions.list_principals)


@principals_app.command("create")
def principals_create(
    context: typer.Context,
    name: NewName,
    kind: Annotated[str, typer.Option(metavar="KIND", help="person or service.")] = "person",
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Create a principal without keys."""
    from rota.cli.principals import actions as principals_actions

    _print(context, form, lambda store: principals_actions.create_principal(store, name, kind))


@principals_app.command("disable")
def principals_disable(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the principal.", show_default=False)],
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Disable a principal for good. All servers refuse its keys within a second."""
    from rota.cli.principals import actions as principals_actions

    _print(context, form, lambda store: principals_actions.disable_principal(store, name))


def _print(context: typer.Context, form: OutputFormat, work: Callable[[PrincipalStore], Awaitable[CliPage]]) -> None:
    from rota.cli.principals import actions as principals_actions

    principals_actions.run(load_settings(context, quietly=True).settings, work, form=form)
