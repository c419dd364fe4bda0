"""`rota keys`: who may call the API, and what each may do there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import typer

from rota.cli.books_options import FreshName, group
from rota.cli.form import Form
from rota.cli.options import Output, load

if TYPE_CHECKING:
    from rota.cli.books_view import Page
    from rota.server.access import Keys

keys_app = group(
    "Keys of the API: who may call it, and what each may do.\n\n"
    "A viewer reads, a submitter also submits, cancels and retries jobs, an operator also gives priority CRITICAL and "
    "works on queues, workers and dead letters, an admin also changes shows, quotas and keys."
)


@keys_app.command("create")
def keys_create(
    context: typer.Context,
    name: FreshName,
    role: Annotated[
        str, typer.Option(metavar="ROLE", help="viewer, submitter, operator or admin.", show_default=False)
    ],
    show: Annotated[
        list[str] | None,
        typer.Option(metavar="SHOW", help="Only in this show; may be given again.", show_default=False),
    ] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="TIME", help="Refused after that, such as 12h or 30d.", show_default=False)
    ] = None,
    form: Output = Form.TEXT,
) -> None:
    """Make a key. It is shown this once."""
    from rota.cli import keys

    _print(context, form, lambda access: keys.created(access, name, role, show, expires))


@keys_app.command("list")
def keys_list(
    context: typer.Context,
    everything: Annotated[bool, typer.Option("--all", help="Also those that were revoked.")] = False,
    form: Output = Form.TEXT,
) -> None:
    """Every key, what it may do, and when it was last used."""
    from rota.cli import keys

    _print(context, form, lambda access: keys.listed(access, everything=everything))


@keys_app.command("revoke")
def keys_revoke(
    context: typer.Context,
    key: Annotated[
        str, typer.Argument(metavar="ID", help="Its id, the beginning of it, or its name.", show_default=False)
    ],
    form: Output = Form.TEXT,
) -> None:
    """Let a key in no more, anywhere, within a second."""
    from rota.cli import keys

    _print(context, form, lambda access: keys.revoked(access, key))


def _print(context: typer.Context, form: Form, work: Callable[[Keys], Awaitable[Page]]) -> None:
    from rota.cli import keys

    keys.run(load(context, quietly=True).settings, work, form=form)
