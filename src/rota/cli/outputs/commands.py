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
    "Outputs that the output policy holds, quarantines or has redacted.\n\n"
    "Frames do not run again: a release makes the stored output readable. The submitter of a job cannot release or "
    "redact its outputs."
)

OutputIdArg = Annotated[int, typer.Argument(metavar="OUTPUT", min=0, help="Id as shown by `rota outputs list`.")]
ReasonOption = Annotated[
    str, typer.Option("--reason", metavar="TEXT", help="Reason, stored in the audit log.", show_default=False)
]


@outputs_app.command("list")
def outputs_list(
    context: typer.Context,
    show: Annotated[
        str | None, typer.Option(metavar="SHOW", help="Only outputs of this show.", show_default=False)
    ] = None,
    job: Annotated[
        str | None, typer.Option(metavar="JOB", help="Only outputs of this job: id, id prefix, or name.")
    ] = None,
    state: Annotated[
        Literal["held", "quarantined", "redacted", "released"] | None, typer.Option(help="Only outputs in this state.")
    ] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="Maximum number.")] = 50,
    after: Annotated[
        int | None, typer.Option(metavar="OUTPUT", help="Start after this output (next page).", show_default=False)
    ] = None,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """List held, quarantined, redacted and released outputs, newest first."""
    from rota.cli.outputs import actions as outputs_actions

    _print(context, form, lambda at: outputs_actions.list_outputs(at, show, job, state, limit, after))


@outputs_app.command("show")
def outputs_show(
    context: typer.Context,
    output: OutputIdArg,
    reveal: Annotated[
        bool, typer.Option("--reveal", help="Also print the value; the access is recorded in the audit log.")
    ] = False,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Show all checks of an output with their findings."""
    from rota.cli.outputs import actions as outputs_actions

    _print(context, form, lambda at: outputs_actions.show_output(at, output, reveal=reveal))


@outputs_app.command("release")
def outputs_release(
    context: typer.Context, output: OutputIdArg, reason: ReasonOption, form: OutputOption = OutputFormat.TEXT
) -> None:
    """Make an output readable as the frame produced it, after a false positive."""
    from rota.cli.outputs import actions as outputs_actions

    outputs_actions.release_output(load_settings(context, quietly=True).settings, output, reason, form=form)


@outputs_app.command("redact")
def outputs_redact(
    context: typer.Context,
    output: OutputIdArg,
    reason: ReasonOption,
    whole: Annotated[bool, typer.Option("--whole", help="Remove the whole value.")] = False,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Make an output readable without the parts that scanners found."""
    from rota.cli.outputs import actions as outputs_actions

    settings = load_settings(context, quietly=True).settings
    outputs_actions.redact_output(settings, output, reason, whole=whole, form=form)


def _print(context: typer.Context, form: OutputFormat, work: Callable[[OutputContext], Awaitable[CliPage]]) -> None:
    from rota.cli.outputs import actions as outputs_actions

    outputs_actions.run(load_settings(context, quietly=True).settings, work, form=form)
