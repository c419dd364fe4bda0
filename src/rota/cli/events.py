"""Following events: line by line, asked of the API, through cuts and restarts of servers.

It goes on behind the last event it has seen, so nothing is told twice and nothing is left out; where the server says
that some are missing (`reset`) this is told. A key that is refused, or a filter that is wrong, ends it with a sentence;
a server that is away is waited for. It ends when nobody reads what it prints.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Final

import msgspec

from rota.cli import output
from rota.cli.form import Form
from rota.local.api_key import endpoint
from rota.model.backoff import Backoff
from rota.model.errors import RateLimited, Unavailable
from rota.model.events import RESET, Event
from rota.model.settings import Settings
from rota.model.sse import Reading
from rota.sdk.wire import Silent, Wire

PATH: Final = "/events"
AGAIN: Final = Backoff(first_s=0.1, longest_s=5.0)
BAD: Final = frozenset({"job.failed", "job.timeout", "job.denied", "worker.lost", "dlq.added"})


async def follow(settings: Settings, asked: Mapping[str, str], after: str, form: Form) -> None:
    wire = Wire(partial(endpoint, settings))
    try:
        async for told in stream(wire, asked, after):
            if not _printed(told, form):
                return
    finally:
        await wire.close()


async def stream(wire: Wire, asked: Mapping[str, str], after: str = "") -> AsyncIterator[str]:
    """The data of each event, for ever."""
    reading, failures = Reading(after), 0
    while True:
        pause_s = 0.0
        try:
            async for told in _connected(wire, asked, reading):
                failures = 0
                yield told
        except Silent:
            pass  # a line comes every fifteen seconds, so nobody is there any more
        except RateLimited as busy:
            pause_s = float(str(busy.facts.get("retry_after_s", 1)))
        except Unavailable as away:
            if not failures:
                output.aside(f"rota: {away.sentence} Trying on.")
        failures += 1
        await asyncio.sleep(max(pause_s, AGAIN.pause_s(failures, 0.5)))


async def _connected(wire: Wire, asked: Mapping[str, str], reading: Reading) -> AsyncIterator[str]:
    headers = {"last-event-id": reading.last_id} if reading.last_id else {}
    async with wire.stream(PATH, query=asked, headers=headers) as answer:
        async for line in answer.aiter_lines():
            if (told := reading.feed(line)) is not None:
                yield told.data


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
    words = (at, f"{event.kind:<15}", event.show or "-", str(event.job) if event.job else "", facts)
    return "  ".join(word for word in words if word)


def _style(event: Event) -> str:
    if event.kind in BAD:
        return "red"
    return "yellow" if event.kind in (RESET, "job.cancelled") else ""
