"""Typer commands of `rota outputs`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rota.cli.core.options import OutputOption, load_settings
from rota.cli.core.output_format import OutputFormat
from rota.cli.quota.options import command_group

if TYPE_CHECKING:
    from rota.cli.core.tables import CliPage
    from rota.cli.outputs.actions import OutputContext

outputs_app = command_group(
    "Outputs that the output policy holds, keeps back or has redacted.\n\n"
    "Nothing runs again: a release lets out what the frame left. Who submitted a job may not decide about its outputs."
)

OutputIdArg = Annotated[int, typer.Argument(metavar="OUTPUT", min=0, help="Its id as `rota outputs list` shows it.")]
ReasonOption = Annotated[
    str, typer.Option("--reason", metavar="TEXT", help="Why; kept in the audit trail.", show_default=False)
]


@outputs_app.command("list")
def outputs_list(
    context: typer.Context,
    show: Annotated[str | None, typer.Option(metavar="SHOW", help="Those of this show.", show_default=False)] = None,
    job: Annotated[
        str | None, typer.Option(metavar="JOB", help="Those of this job: id, beginning of it, or name.")
    ] = None,
    state: Annotated[
        Literal["held", "quarantined", "redacted", "released"] | None, typer.Option(help="Those in this state.")
    ] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="At most so many.")] = 50,
    after: Annotated[
        int | None, typer.Option(metavar="OUTPUT", help="From the one after this on.", show_default=False)
    ] = None,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Outputs that are held, quarantined, redacted or released, the newest first."""
    from rota.cli.outputs import actions as outputs_actions

    _print(context, form, lambda at: outputs_actions.list_outputs(at, show, job, state, limit, after))


@outputs_app.command("show")
def outputs_show(
    context: typer.Context,
    output: OutputIdArg,
    reveal: Annotated[
        bool, typer.Option("--reveal", help="Also what it holds. That somebody looked is in the audit trail.")
    ] = False,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Every check of one of them, with what was found where."""
    from rota.cli.outputs import actions as outputs_actions

    _print(context, form, lambda at: outputs_actions.show_output(at, output, reveal=reveal))


@outputs_app.command("release")
def outputs_release(
    context: typer.Context, output: OutputIdArg, reason: ReasonOption, form: OutputOption = OutputFormat.TEXT
) -> None:
    """Let it be read as the frame left it: a false alarm."""
    from rota.cli.outputs import actions as outputs_actions

    _print(context, form, lambda at: outputs_actions.release_output(at, output, reason))


@outputs_app.command("redact")
def outputs_redact(
    context: typer.Context,
    output: OutputIdArg,
    reason: ReasonOption,
    whole: Annotated[bool, typer.Option("--whole", help="Leave nothing of it.")] = False,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Let it be read without what scanners find in it."""
    from rota.cli.outputs import actions as outputs_actions

    _print(context, form, lambda at: outputs_actions.redact_output(at, output, reason, whole=whole))


def _print(context: typer.Context, form: OutputFormat, work: Callable[[OutputContext], Awaitable[CliPage]]) -> None:
    from rota.cli.outputs import actions as outputs_actions

    outputs_actions.run(load_settings(context, quietly=True).settings, work, form=form)
