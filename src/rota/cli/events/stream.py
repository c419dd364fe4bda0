"""Following events: line by line, asked of the API, through cuts and restarts of servers.

It goes on behind the last event it has seen, so nothing is told twice and nothing is left out; where the server says
that some are missing (`reset`) this is told. A key that is refused, or a filter that is wrong, ends it with a sentence;
a server that is away is waited for. It ends when nobody reads what it prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

import msgspec

from rota.cli.core import output
from rota.cli.core.output_format import OutputFormat
from rota.client.events import follow_events
from rota.client.http import HttpClient
from rota.local.api_key import find_endpoint
from rota.model.errors import Unavailable
from rota.model.events import RESET_KIND, Event
from rota.model.settings import Settings

EVENTS_PATH: Final = "/events"
FAILURE_KINDS: Final = frozenset(
    {"job.failed", "job.timeout", "job.denied", "worker.lost", "dlq.added"}
    | {"agent.failed", "agent.timeout", "agent.lost", "agent.quarantined"}
    | {
        "run.ended.failed",
        "run.ended.timeout",
        "run.ended.denied",
        "saga.failed",
        "saga.corrupt",
        "saga.ended.incomplete",
    }
)


async def follow(settings: Settings, asked: Mapping[str, str], after: str, form: OutputFormat) -> None:
    wire = HttpClient(partial(find_endpoint, settings))
    try:
        async for told in follow_events(wire, EVENTS_PATH, asked, after=after, on_away=_report_unavailable):
            if not _print_event(told.data, form):
                return
    finally:
        await wire.close()


def _report_unavailable(away: Unavailable) -> None:
    output.print_stderr(f"rota: {away.sentence} Trying on.")


def _print_event(told: str, form: OutputFormat) -> bool:
    if form is OutputFormat.JSON:
        return output.print_line(told)
    event = msgspec.json.decode(told, type=Event)
    if form is OutputFormat.YAML:
        return output.print_line(f"---\n{output.format_data(event, form)}".rstrip())
    return output.print_line(format_event(event), _style(event))


def format_event(event: Event) -> str:
    facts = " ".join(f"{name}={value}" for name, value in event.facts.items())
    at = event.at.astimezone().strftime("%H:%M:%S.%f")[:-3]
    ids = (f"run={event.run}" if event.run else "", str(event.job) if event.job else "")
    words = (at, f"{event.kind:<15}", event.show or "-", *ids, facts)
    return "  ".join(word for word in words if word)


def _style(event: Event) -> str:
    if event.kind in FAILURE_KINDS:
        return "red"
    return "yellow" if event.kind in (RESET_KIND, "job.cancelled") else ""
