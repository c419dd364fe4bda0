"""Typer commands of `rota approvals`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import typer

from rota.cli.core.options import OutputOption, load_settings
from rota.cli.core.output_format import OutputFormat
from rota.cli.quota.options import command_group

if TYPE_CHECKING:
    from rota.cli.approvals.actions import ApprovalContext
    from rota.cli.core.tables import CliPage

approvals_app = command_group("Jobs and workflow steps that wait for approval.")
ApprovalArg = Annotated[
    str,
    typer.Argument(
        metavar="ID", help="Id of the approval or of the waiting job; RUN:STEP for a workflow step.", show_default=False
    ),
]
ReasonOption = Annotated[str, typer.Option("--reason", "-m", metavar="TEXT", help="Reason, stored with the vote.")]


@approvals_app.command("list")
def approvals_list(
    context: typer.Context,
    state: Annotated[
        str, typer.Option(metavar="STATE", help="pending, granted, rejected, expired, closed, or all.")
    ] = "pending",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="Maximum number.")] = 50,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """List approvals, oldest first."""
    from rota.cli.approvals import actions as approvals_actions

    _print(context, form, lambda approvals: approvals_actions.list_approvals(approvals, state, limit))


@approvals_app.command("show")
def approvals_show(context: typer.Context, which: ApprovalArg, form: OutputOption = OutputFormat.TEXT) -> None:
    """Show what is to be approved: the job or step, what requires it, the approvers, and the time left."""
    from rota.cli.approvals import actions as approvals_actions

    _print(context, form, lambda approvals: approvals_actions.show_approval(approvals, which))


@approvals_app.command("approve")
def approvals_approve(
    context: typer.Context, which: ApprovalArg, reason: ReasonOption = "", form: OutputOption = OutputFormat.TEXT
) -> None:
    """Approve, as the principal of the API key. It continues at quorum; its submitter cannot approve it."""
    from rota.cli.approvals import actions as approvals_actions

    approvals_actions.approve(load_settings(context, quietly=True).settings, which, reason, form=form)


@approvals_app.command("reject")
def approvals_reject(
    context: typer.Context, which: ApprovalArg, reason: ReasonOption = "", form: OutputOption = OutputFormat.TEXT
) -> None:
    """Reject, as the principal of the API key: the job or step is denied."""
    from rota.cli.approvals import actions as approvals_actions

    approvals_actions.reject(load_settings(context, quietly=True).settings, which, reason, form=form)


def _print(context: typer.Context, form: OutputFormat, work: Callable[[ApprovalContext], Awaitable[CliPage]]) -> None:
    from rota.cli.approvals import actions as approvals_actions

    approvals_actions.run(load_settings(context, quietly=True).settings, work, form=form)
