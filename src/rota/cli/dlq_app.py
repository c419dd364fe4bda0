"""`rota dlq`: dead letters, and failed frames that may become some."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rota.cli.books_options import group
from rota.cli.form import Form
from rota.cli.options import Output, load

if TYPE_CHECKING:
    from rota.cli.dlq import ActName, Given

dlq_app = group(
    "Dead letters: what was given up, why, and how it may come back.\n\n"
    "A frame that has failed for good is kept for retention.failed_frames and may be retried, moved to the dead "
    "letters or discarded until then (--failed lists those). Dead letters stay until somebody retries or purges them. "
    "Each command that changes anything tells how many it would touch and asks first."
)


Kind = Literal["frame", "job", "message", "output", "saga"]


def _ids(what: str) -> Any:
    return typer.Argument(metavar="ID", help=f"Ids of {what}, as `rota dlq list` shows them.", show_default=False)


def _option(metavar: str, text: str) -> Any:
    return typer.Option(metavar=metavar, help=text, show_default=False)


Letters = Annotated[list[str] | None, _ids("dead letters")]
Frames = Annotated[list[str] | None, _ids("failed frames")]
Either = Annotated[list[str] | None, _ids("dead letters, or of failed frames with --failed")]
One = Annotated[str, typer.Argument(metavar="ID", help="Its id as `rota dlq list` shows it.", show_default=False)]
OfQueue = Annotated[str | None, _option("QUEUE", "Those of this queue.")]
OfKind = Annotated[Kind | None, typer.Option(help="Those of this kind.", show_default=False)]
OfReason = Annotated[str | None, _option("CODE", "Those with this reason code.")]
OfJob = Annotated[str | None, _option("JOB", "Those of this job: id, beginning of it, or name.")]
OlderThan = Annotated[str | None, _option("AGE", "Those that ended longer ago, such as 30min, 12h or 7d.")]
Limit = Annotated[int | None, _option("N", "At most so many, the oldest first.")]
All = Annotated[bool, typer.Option("--all", help="All there are; without it something must be named.")]
Failed = Annotated[bool, typer.Option("--failed", help="Failed frames that are kept, instead of dead letters.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do it without asking.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say how many it would be.")]


@dlq_app.command("list")
def dlq_list(
    context: typer.Context,
    failed: Failed = False,
    queue: OfQueue = None,
    kind: OfKind = None,
    reason: OfReason = None,
    job: OfJob = None,
    older_than: OlderThan = None,
    limit: Annotated[int, typer.Option(metavar="N", help="At most so many.")] = 50,
    after: Annotated[str | None, _option("ID", "From the one after this on.")] = None,
    form: Output = Form.TEXT,
) -> None:
    """Dead letters, or failed frames, the oldest first."""
    from rota.cli import dlq

    given = dlq.Given(queue=queue, kind=kind, reason=reason, job=job, older_than=older_than, limit=limit)
    dlq.show_list(load(context, quietly=True).settings, given, failed=failed, after=after, form=form)


@dlq_app.command("show")
def dlq_show(context: typer.Context, which: One, failed: Failed = False, form: Output = Form.TEXT) -> None:
    """Everything about one of them, with its error and its payload."""
    from rota.cli import dlq

    dlq.show_one(load(context, quietly=True).settings, which, failed=failed, form=form)


@dlq_app.command("retry")
def dlq_retry(
    context: typer.Context,
    ids: Either = None,
    failed: Failed = False,
    queue: OfQueue = None,
    kind: OfKind = None,
    reason: OfReason = None,
    job: OfJob = None,
    older_than: OlderThan = None,
    limit: Limit = None,
    everything: All = False,
    yes: Yes = False,
    dry_run: DryRun = False,
    form: Output = Form.TEXT,
) -> None:
    """Queue frames again, with all their attempts. Those that are named are retried together or not at all."""
    from rota.cli import dlq

    given = dlq.Given(ids=ids, queue=queue, kind=kind, reason=reason, job=job, older_than=older_than, limit=limit)
    _act(context, "retry", given, failed, everything, yes, dry_run, form)


@dlq_app.command("move")
def dlq_move(
    context: typer.Context,
    ids: Frames = None,
    queue: OfQueue = None,
    reason: OfReason = None,
    job: OfJob = None,
    older_than: OlderThan = None,
    limit: Limit = None,
    everything: All = False,
    yes: Yes = False,
    dry_run: DryRun = False,
    form: Output = Form.TEXT,
) -> None:
    """Move failed frames to the dead letters.

    There they stay until somebody decides, however long that takes.
    """
    from rota.cli import dlq

    given = dlq.Given(ids=ids, queue=queue, reason=reason, job=job, older_than=older_than, limit=limit)
    _act(context, "move", given, True, everything, yes, dry_run, form)


@dlq_app.command("discard")
def dlq_discard(
    context: typer.Context,
    ids: Frames = None,
    queue: OfQueue = None,
    reason: OfReason = None,
    job: OfJob = None,
    older_than: OlderThan = None,
    limit: Limit = None,
    yes: Yes = False,
    dry_run: DryRun = False,
    form: Output = Form.TEXT,
) -> None:
    """Forget failed frames. Needs a filter.

    They are no longer counted, as if they had never been queued.
    """
    from rota.cli import dlq

    given = dlq.Given(ids=ids, queue=queue, reason=reason, job=job, older_than=older_than, limit=limit)
    _act(context, "discard", given, True, False, yes, dry_run, form)


@dlq_app.command("purge")
def dlq_purge(
    context: typer.Context,
    ids: Letters = None,
    queue: OfQueue = None,
    kind: OfKind = None,
    reason: OfReason = None,
    job: OfJob = None,
    older_than: OlderThan = None,
    limit: Limit = None,
    yes: Yes = False,
    dry_run: DryRun = False,
    form: Output = Form.TEXT,
) -> None:
    """Forget dead letters for good. Needs a filter: everything at once cannot be purged."""
    from rota.cli import dlq

    given = dlq.Given(ids=ids, queue=queue, kind=kind, reason=reason, job=job, older_than=older_than, limit=limit)
    _act(context, "purge", given, False, False, yes, dry_run, form)


def _act(
    context: typer.Context,
    name: ActName,
    given: Given,
    failed: bool,
    everything: bool,
    yes: bool,
    dry_run: bool,
    form: Form,
) -> None:
    from rota.cli import dlq

    asked = dlq.Asked(dlq.ACTS[name], given, failed=failed, everything=everything)
    settings = load(context, quietly=True).settings
    sys.exit(dlq.act(settings, asked, yes=yes, dry_run=dry_run, form=form))
