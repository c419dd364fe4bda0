"""Typer commands of `rota queue`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import typer

from rota.cli.core.options import OutputOption, load_settings
from rota.cli.core.output_format import OutputFormat
from rota.cli.quota.options import command_group

if TYPE_CHECKING:
    from rota.cli.core.tables import CliPage
    from rota.queue import Queue

queue_app = command_group(
    "Queues of frames: counts, pausing, storage.\n\n"
    "Counts are exact at any backlog. For permanently failed frames see `rota dlq`."
)

QueueNameArg = Annotated[str, typer.Argument(metavar="QUEUE", help="Name of the queue.", show_default=False)]


@queue_app.command("counts")
def queue_counts(
    context: typer.Context,
    queues: Annotated[
        list[str] | None, typer.Argument(metavar="QUEUE", help="Only these queues.", show_default=False)
    ] = None,
    fast: Annotated[bool, typer.Option("--fast", help="As of the last compaction, about a second ago.")] = False,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Count waiting, running and ended frames by queue.

    The counts are exact and consistent: all are of one moment.
    """
    from rota.cli.queue import actions as queue_actions

    _print(context, form, lambda queue: queue_actions.show_counts(queue, queues or [], fast=fast))


@queue_app.command("list")
def queue_list(context: typer.Context, form: OutputOption = OutputFormat.TEXT) -> None:
    """List queues with their waiting frames and the age of the oldest."""
    from rota.cli.queue import actions as queue_actions

    _print(context, form, queue_actions.list_queues)


@queue_app.command("pause")
def queue_pause(context: typer.Context, name: QueueNameArg, form: OutputOption = OutputFormat.TEXT) -> None:
    """Pause a queue: no more frames are claimed. Running frames continue, and frames can still be queued."""
    from rota.cli.queue import actions as queue_actions

    _print(context, form, lambda queue: queue_actions.set_paused(queue, name, paused=True))


@queue_app.command("resume")
def queue_resume(context: typer.Context, name: QueueNameArg, form: OutputOption = OutputFormat.TEXT) -> None:
    """Resume a paused queue."""
    from rota.cli.queue import actions as queue_actions

    _print(context, form, lambda queue: queue_actions.set_paused(queue, name, paused=False))


@queue_app.command("rebuild-counts")
def queue_rebuild_counts(context: typer.Context, form: OutputOption = OutputFormat.TEXT) -> None:
    """Rebuild the counters from the rows.

    Afterwards the counters follow queue.counter_mode. During the rebuild, which reads all rows once, frames can neither
    be queued nor end.
    """
    from rota.cli.queue import actions as queue_actions

    mode = load_settings(context, quietly=True).settings.queue.counter_mode
    _print(context, form, lambda queue: queue_actions.rebuild_counts(queue, mode))


@queue_app.command("storage")
def queue_storage(context: typer.Context, form: OutputOption = OutputFormat.TEXT) -> None:
    """Show the ring of slots, the side tables, and transactions that block cleanup.

    Also shows the counter mode and the replica that does the maintenance.
    """
    from rota.cli.queue import actions as queue_actions

    mode = load_settings(context, quietly=True).settings.queue.counter_mode
    _print(context, form, lambda queue: queue_actions.show_storage(queue, mode))


def _print(context: typer.Context, form: OutputFormat, work: Callable[[Queue], Awaitable[CliPage]]) -> None:
    from rota.cli.queue import actions as queue_actions

    queue_actions.run(load_settings(context, quietly=True).settings, work, form=form)
