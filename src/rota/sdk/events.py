"""Server-sent events, followed through cuts and restarts of servers: each goes on behind the last one that was read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Final

from rota.model.errors import RateLimited, Unavailable
from rota.model.sse import Reading, Told
from rota.sdk.wire import Wire

NO_CONTENT: Final = 204


async def followed(
    wire: Wire, path: str, query: Mapping[str, object] | None = None, *, after: str = ""
) -> AsyncIterator[Told]:
    """Until the server says that there are no more. Raises Unavailable when it has been away for about a minute."""
    reading, streak = Reading(after), 0
    while True:
        wait_s = 0.0
        try:
            headers = {"last-event-id": reading.last_id} if reading.last_id else {}
            async with wire.stream(path, query=query, headers=headers) as answer:
                async for line in answer.aiter_lines():
                    streak = 0 if line.startswith((":", "data:")) else streak
                    if (told := reading.feed(line)) is not None:
                        yield told
                if answer.status_code == NO_CONTENT:
                    return
        except RateLimited as busy:
            wait_s = float(str(busy.facts.get("retry_after_s", 1)))
        except Unavailable:
            pass  # gone on below
        streak += 1
        await wire.pause(streak, wait_s)
