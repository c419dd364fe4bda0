"""Follows events from the API and prints them line by line, across disconnects and server restarts.

After a disconnect it resumes after the last event it received, so no event is printed twice or skipped; a gap that the
server reports (`reset`) is printed. A refused key or an invalid filter ends it with an error; an unavailable server is
retried. It ends when its output pipe is closed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from rota.cli.core import output
from rota.cli.core.api import api_client
from rota.cli.core.output_format import OutputFormat
from rota.client.events import follow_events
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


async def follow(settings: Settings, filters: Mapping[str, str], after: str, form: OutputFormat) -> None:
    async with api_client(settings) as client:
        async for message in follow_events(
            client, EVENTS_PATH, filters, after=after, on_unavailable=_report_unavailable
        ):
            if not _print_event(message.data, form):
                return


def _report_unavailable(error: Unavailable) -> None:
    output.print_stderr(f"rota: {error.sentence} Retrying.")


def _print_event(data: str, form: OutputFormat) -> bool:
    if form is OutputFormat.JSON:
        return output.print_line(data)
    event = msgspec.json.decode(data, type=Event)
    if form is OutputFormat.YAML:
        return output.print_line(f"---\n{output.format_data(event, form)}".rstrip())
    return output.print_line(format_event(event), _style(event))


def format_event(event: Event) -> str:
    facts = " ".join(f"{name}={value}" for name, value in event.facts.items())
    at = event.at.astimezone().strftime("%H:%M:%S.%f")[:-3]
    ids = (f"run={event.run}" if event.run else "", str(event.job) if event.job else "")
    parts = (at, f"{event.kind:<15}", event.show or "-", *ids, facts)
    return "  ".join(part for part in parts if part)


def _style(event: Event) -> str:
    if event.kind in FAILURE_KINDS:
        return "red"
    return "yellow" if event.kind in (RESET_KIND, "job.cancelled") else ""
