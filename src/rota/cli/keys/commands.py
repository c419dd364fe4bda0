"""Typer commands of `rota keys`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import typer

from rota.cli.core.options import OutputOption, load_settings
from rota.cli.core.output_format import OutputFormat
from rota.cli.quota.options import NewName, command_group

if TYPE_CHECKING:
    from rota.cli.core.tables import CliPage
    from rota.server.access import ApiKeyStore

KindOption = Annotated[str, typer.Option(metavar="KIND", help="Of a new principal: person or service.")]
keys_app = command_group(
    "API keys and their roles.\n\n"
    "A viewer reads; a submitter also submits, cancels and retries jobs; an operator also sets priority CRITICAL and "
    "manages queues, workers and dead letters; an admin also changes shows, quotas and keys."
)


@keys_app.command("create")
def keys_create(
    context: typer.Context,
    name: NewName,
    role: Annotated[
        str, typer.Option(metavar="ROLE", help="viewer, submitter, operator or admin.", show_default=False)
    ],
    show: Annotated[
        list[str] | None,
        typer.Option(metavar="SHOW", help="Only in this show; repeatable.", show_default=False),
    ] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="TIME", help="Lifetime, such as 12h or 30d.", show_default=False)
    ] = None,
    principal: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="PRINCIPAL",
            help="Whom it belongs to; default: a new principal with the name of the key.",
            show_default=False,
        ),
    ] = None,
    kind: KindOption = "service",
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Create a key. It is shown only once."""
    from rota.cli.keys import actions as keys_actions

    _print(
        context,
        form,
        lambda keys: keys_actions.create_key(keys, name, role, show, expires, principal=principal, kind=kind),
    )


@keys_app.command("list")
def keys_list(
    context: typer.Context,
    everything: Annotated[bool, typer.Option("--all", help="Also revoked keys.")] = False,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """List keys, their grants, and when they were last used."""
    from rota.cli.keys import actions as keys_actions

    _print(context, form, lambda keys: keys_actions.list_keys(keys, everything=everything))


@keys_app.command("revoke")
def keys_revoke(
    context: typer.Context,
    key: Annotated[str, typer.Argument(metavar="ID", help="Id, id prefix, or name.", show_default=False)],
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Revoke a key. All servers refuse it within a second."""
    from rota.cli.keys import actions as keys_actions

    _print(context, form, lambda keys: keys_actions.revoke_key(keys, key))


def _print(context: typer.Context, form: OutputFormat, work: Callable[[ApiKeyStore], Awaitable[CliPage]]) -> None:
    from rota.cli.keys import actions as keys_actions

    keys_actions.run(load_settings(context, quietly=True).settings, work, form=form)
