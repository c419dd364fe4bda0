"""`rota approvals`: what waits for people to agree, and what they say."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import typer

from rota.cli.books_options import group
from rota.cli.form import Form
from rota.cli.options import Output, load

if TYPE_CHECKING:
    from rota.cli.approvals import Desk
    from rota.cli.books_view import Page

approvals_app = group("What waits for people to agree, exactly what that is, and what they say.")
Which = Annotated[
    str,
    typer.Argument(
        metavar="ID", help="The id of the approval, or of the job that waits; RUN:STEP of a step.", show_default=False
    ),
]
Reason = Annotated[str, typer.Option("--reason", "-m", metavar="TEXT", help="Why, for those who read about it later.")]


@approvals_app.command("list")
def approvals_list(
    context: typer.Context,
    state: Annotated[
        str, typer.Option(metavar="STATE", help="pending, granted, rejected, expired, closed, or all.")
    ] = "pending",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="How many.")] = 50,
    form: Output = Form.TEXT,
) -> None:
    """What waits for people to agree, the oldest first."""
    from rota.cli import approvals

    _print(context, form, lambda desk: approvals.listed(desk, state, limit))


@approvals_app.command("show")
def approvals_show(context: typer.Context, which: Which, form: Output = Form.TEXT) -> None:
    """Exactly what is to be approved: the job or step, what asks for it, who may agree, and the time left."""
    from rota.cli import approvals

    _print(context, form, lambda desk: approvals.shown(desk, which))


@approvals_app.command("approve")
def approvals_approve(context: typer.Context, which: Which, reason: Reason = "", form: Output = Form.TEXT) -> None:
    """Agree. Once enough have, the job or step goes on; who submitted or started it cannot."""
    from rota.cli import approvals

    _print(context, form, lambda desk: approvals.approved(desk, which, reason))


@approvals_app.command("reject")
def approvals_reject(context: typer.Context, which: Which, reason: Reason = "", form: Output = Form.TEXT) -> None:
    """Refuse: the job or step is denied."""
    from rota.cli import approvals

    _print(context, form, lambda desk: approvals.rejected(desk, which, reason))


def _print(context: typer.Context, form: Form, work: Callable[[Desk], Awaitable[Page]]) -> None:
    from rota.cli import approvals

    approvals.run(load(context, quietly=True).settings, work, form=form)
