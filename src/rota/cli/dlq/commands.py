"""Typer commands of `rota dlq`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rota.cli.core.options import OutputOption, load_settings
from rota.cli.core.output_format import OutputFormat
from rota.cli.quota.options import command_group

if TYPE_CHECKING:
    from rota.cli.dlq.actions import DlqActionName, DlqSelection

dlq_app = command_group(
    "Dead letters and failed frames.\n\n"
    "A frame that failed permanently is kept for retention.failed_frames. Until then it can be retried, moved to the "
    "dead letters or discarded (--failed lists these frames). Dead letters are kept until they are retried or purged. "
    "Commands that change entries print the number and ask for confirmation."
)


DeadLetterKind = Literal["frame", "job", "message", "output", "saga"]


def _ids_argument(what: str) -> Any:
    return typer.Argument(metavar="ID", help=f"Ids of {what}, as shown by `rota dlq list`.", show_default=False)


def _option(metavar: str, text: str) -> Any:
    return typer.Option(metavar=metavar, help=text, show_default=False)


DeadLetterIds = Annotated[list[str] | None, _ids_argument("dead letters")]
FailedFrameIds = Annotated[list[str] | None, _ids_argument("failed frames")]
EntryIds = Annotated[list[str] | None, _ids_argument("dead letters, or of failed frames with --failed")]
EntryIdArg = Annotated[str, typer.Argument(metavar="ID", help="Id as shown by `rota dlq list`.", show_default=False)]
QueueOption = Annotated[str | None, _option("QUEUE", "Only entries of this queue.")]
KindOption = Annotated[DeadLetterKind | None, typer.Option(help="Only entries of this kind.", show_default=False)]
ReasonOption = Annotated[str | None, _option("CODE", "Only entries with this reason code.")]
JobOption = Annotated[str | None, _option("JOB", "Only entries of this job: id, id prefix, or name.")]
OlderThanOption = Annotated[str | None, _option("AGE", "Only entries older than this, such as 30min, 12h or 7d.")]
LimitOption = Annotated[int | None, _option("N", "Maximum number, oldest first.")]
AllOption = Annotated[bool, typer.Option("--all", help="All entries; otherwise ids or a filter are required.")]
FailedOption = Annotated[bool, typer.Option("--failed", help="Failed frames instead of dead letters.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only print how many entries would change.")]


@dlq_app.command("list")
def dlq_list(
    context: typer.Context,
    failed: FailedOption = False,
    queue: QueueOption = None,
    kind: KindOption = None,
    reason: ReasonOption = None,
    job: JobOption = None,
    older_than: OlderThanOption = None,
    limit: Annotated[int, typer.Option(metavar="N", help="Maximum number.")] = 50,
    after: Annotated[str | None, _option("ID", "Start after this entry (next page).")] = None,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """List dead letters, or failed frames, oldest first."""
    from rota.cli.dlq import actions as dlq_actions

    selection = dlq_actions.DlqSelection(
        queue=queue, kind=kind, reason=reason, job=job, older_than=older_than, limit=limit
    )
    dlq_actions.show_list(
        load_settings(context, quietly=True).settings, selection, failed=failed, after=after, form=form
    )


@dlq_app.command("show")
def dlq_show(
    context: typer.Context, which: EntryIdArg, failed: FailedOption = False, form: OutputOption = OutputFormat.TEXT
) -> None:
    """Show one entry with its error and payload."""
    from rota.cli.dlq import actions as dlq_actions

    dlq_actions.show_entry(load_settings(context, quietly=True).settings, which, failed=failed, form=form)


@dlq_app.command("retry")
def dlq_retry(
    context: typer.Context,
    ids: EntryIds = None,
    failed: FailedOption = False,
    queue: QueueOption = None,
    kind: KindOption = None,
    reason: ReasonOption = None,
    job: JobOption = None,
    older_than: OlderThanOption = None,
    limit: LimitOption = None,
    everything: AllOption = False,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Queue frames again with all their attempts. Entries named by id are retried together or not at all."""
    from rota.cli.dlq import actions as dlq_actions

    selection = dlq_actions.DlqSelection(
        ids=ids, queue=queue, kind=kind, reason=reason, job=job, older_than=older_than, limit=limit
    )
    _run_action(context, "retry", selection, failed, everything, yes, dry_run, form)


@dlq_app.command("move")
def dlq_move(
    context: typer.Context,
    ids: FailedFrameIds = None,
    queue: QueueOption = None,
    reason: ReasonOption = None,
    job: JobOption = None,
    older_than: OlderThanOption = None,
    limit: LimitOption = None,
    everything: AllOption = False,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Move failed frames to the dead letters.

    They stay there until they are retried or purged.
    """
    from rota.cli.dlq import actions as dlq_actions

    selection = dlq_actions.DlqSelection(
        ids=ids, queue=queue, reason=reason, job=job, older_than=older_than, limit=limit
    )
    _run_action(context, "move", selection, True, everything, yes, dry_run, form)


@dlq_app.command("discard")
def dlq_discard(
    context: typer.Context,
    ids: FailedFrameIds = None,
    queue: QueueOption = None,
    reason: ReasonOption = None,
    job: JobOption = None,
    older_than: OlderThanOption = None,
    limit: LimitOption = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Delete failed frames. Needs a filter.

    They are no longer counted, as if they had never been queued.
    """
    from rota.cli.dlq import actions as dlq_actions

    selection = dlq_actions.DlqSelection(
        ids=ids, queue=queue, reason=reason, job=job, older_than=older_than, limit=limit
    )
    _run_action(context, "discard", selection, True, False, yes, dry_run, form)


@dlq_app.command("purge")
def dlq_purge(
    context: typer.Context,
    ids: DeadLetterIds = None,
    queue: QueueOption = None,
    kind: KindOption = None,
    reason: ReasonOption = None,
    job: JobOption = None,
    older_than: OlderThanOption = None,
    limit: LimitOption = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Delete dead letters permanently. Needs a filter; there is no --all."""
    from rota.cli.dlq import actions as dlq_actions

    selection = dlq_actions.DlqSelection(
        ids=ids, queue=queue, kind=kind, reason=reason, job=job, older_than=older_than, limit=limit
    )
    _run_action(context, "purge", selection, False, False, yes, dry_run, form)


def _run_action(
    context: typer.Context,
    name: DlqActionName,
    selection: DlqSelection,
    failed: bool,
    everything: bool,
    yes: bool,
    dry_run: bool,
    form: OutputFormat,
) -> None:
    from rota.cli.dlq import actions as dlq_actions

    request = dlq_actions.DlqRequest(dlq_actions.DLQ_ACTIONS[name], selection, failed=failed, everything=everything)
    settings = load_settings(context, quietly=True).settings
    sys.exit(dlq_actions.run_action(settings, request, yes=yes, dry_run=dry_run, form=form))
