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
    "Where frames wait and end: counts, pausing, storage.\n\n"
    "Counts are exact at any backlog. What has failed for good is handled by `rota dlq`."
)

QueueNameArg = Annotated[str, typer.Argument(metavar="QUEUE", help="Name of the queue.", show_default=False)]


@queue_app.command("counts")
def queue_counts(
    context: typer.Context,
    queues: Annotated[
        list[str] | None, typer.Argument(metavar="QUEUE", help="These alone.", show_default=False)
    ] = None,
    fast: Annotated[bool, typer.Option("--fast", help="As of the last fold, a second or so ago.")] = False,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Frames that wait, run and have ended, by queue.

    Exact, and all of one moment, whatever goes on meanwhile.
    """
    from rota.cli.queue import actions as queue_actions

    _print(context, form, lambda queue: queue_actions.show_counts(queue, queues or [], fast=fast))


@queue_app.command("list")
def queue_list(context: typer.Context, form: OutputOption = OutputFormat.TEXT) -> None:
    """Every queue, what waits in it and for how long."""
    from rota.cli.queue import actions as queue_actions

    _print(context, form, queue_actions.list_queues)


@queue_app.command("pause")
def queue_pause(context: typer.Context, name: QueueNameArg, form: OutputOption = OutputFormat.TEXT) -> None:
    """Let nothing more be claimed from a queue. What runs goes on, and frames may still be queued."""
    from rota.cli.queue import actions as queue_actions

    _print(context, form, lambda queue: queue_actions.set_paused(queue, name, paused=True))


@queue_app.command("resume")
def queue_resume(context: typer.Context, name: QueueNameArg, form: OutputOption = OutputFormat.TEXT) -> None:
    """Let frames of a paused queue be claimed again."""
    from rota.cli.queue import actions as queue_actions

    _print(context, form, lambda queue: queue_actions.set_paused(queue, name, paused=False))


@queue_app.command("rebuild-counts")
def queue_rebuild_counts(context: typer.Context, form: OutputOption = OutputFormat.TEXT) -> None:
    """Count everything anew from the rows.

    Counters are kept as queue.counter_mode says from then on. Meanwhile frames can neither be queued nor end; it takes
    as long as reading all rows once.
    """
    from rota.cli.queue import actions as queue_actions

    mode = load_settings(context, quietly=True).settings.queue.counter_mode
    _print(context, form, lambda queue: queue_actions.rebuild_counts(queue, mode))


@queue_app.command("storage")
def queue_storage(context: typer.Context, form: OutputOption = OutputFormat.TEXT) -> None:
    """The ring, the tables beside it, and who holds it up.

    Also how counts are kept, and which replica does the upkeep.
    """
    from rota.cli.queue import actions as queue_actions

    mode = load_settings(context, quietly=True).settings.queue.counter_mode
    _print(context, form, lambda queue: queue_actions.show_storage(queue, mode))


def _print(context: typer.Context, form: OutputFormat, work: Callable[[Queue], Awaitable[CliPage]]) -> None:
    from rota.cli.queue import actions as queue_actions

    queue_actions.run(load_settings(context, quietly=True).settings, work, form=form)
