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

from rota.cli import output
from rota.cli.form import Form
from rota.local.api_key import endpoint
from rota.model.errors import Unavailable
from rota.model.events import RESET, Event
from rota.model.settings import Settings
from rota.sdk.events import followed
from rota.sdk.wire import Wire

PATH: Final = "/events"
BAD: Final = frozenset(
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


async def follow(settings: Settings, asked: Mapping[str, str], after: str, form: Form) -> None:
    wire = Wire(partial(endpoint, settings))
    try:
        async for told in followed(wire, PATH, asked, after=after, on_away=_say_away):
            if not _printed(told.data, form):
                return
    finally:
        await wire.close()


def _say_away(away: Unavailable) -> None:
    output.aside(f"rota: {away.sentence} Trying on.")


def _printed(told: str, form: Form) -> bool:
    if form is Form.JSON:
        return output.line(told)
    event = msgspec.json.decode(told, type=Event)
    if form is Form.YAML:
        return output.line(f"---\n{output.data_text(event, form)}".rstrip())
    return output.line(line_of(event), _style(event))


def line_of(event: Event) -> str:
    facts = " ".join(f"{name}={value}" for name, value in event.facts.items())
    at = event.at.astimezone().strftime("%H:%M:%S.%f")[:-3]
    ids = (f"run={event.run}" if event.run else "", str(event.job) if event.job else "")
    words = (at, f"{event.kind:<15}", event.show or "-", *ids, facts)
    return "  ".join(word for word in words if word)


def _style(event: Event) -> str:
    if event.kind in BAD:
        return "red"
    return "yellow" if event.kind in (RESET, "job.cancelled") else ""
