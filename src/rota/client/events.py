"""Server-sent events, followed through cuts and restarts of servers: each goes on behind the last one that was read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final

from rota.client.http import STREAM_FAILURES_MAX, HttpClient, StreamIdle
from rota.model.errors import RateLimited, Unavailable
from rota.model.sse import SseEvent, SseParser

NO_CONTENT: Final = 204


async def follow_events(
    wire: HttpClient,
    path: str,
    query: Mapping[str, object] | None = None,
    *,
    after: str = "",
    on_away: Callable[[Unavailable], None] | None = None,
) -> AsyncIterator[SseEvent]:
    """Until the server says that there are no more. Raises Unavailable when it has been away for about a minute; with
    `on_away`, which is called when it goes away, it is waited for as long as it takes."""
    reading, streak = SseParser(after), 0
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
        except StreamIdle:
            pass  # a line comes every fifteen seconds, so nobody is there any more: gone on below
        except Unavailable as away:
            if on_away is not None and not streak:
                on_away(away)
        streak = streak + 1 if on_away is None else min(streak + 1, STREAM_FAILURES_MAX)
        await wire.pause(streak, wait_s)
