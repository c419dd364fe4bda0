"""Server-sent events. After a disconnect or server restart the stream resumes after the last event read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final

from rota.client.http import STREAM_FAILURES_MAX, HttpClient, StreamIdle
from rota.model.errors import RateLimited, Unavailable
from rota.model.sse import SseEvent, SseParser

NO_CONTENT: Final = 204


async def follow_events(
    http: HttpClient,
    path: str,
    query: Mapping[str, object] | None = None,
    *,
    after: str = "",
    on_unavailable: Callable[[Unavailable], None] | None = None,
) -> AsyncIterator[SseEvent]:
    """Yields events until the server ends the stream.

    Raises Unavailable after about a minute without a server. With `on_unavailable`, which is called at the first
    failure, retries without limit.
    """
    parser, streak = SseParser(after), 0
    while True:
        wait_s = 0.0
        try:
            headers = {"last-event-id": parser.last_id} if parser.last_id else {}
            async with http.stream(path, query=query, headers=headers) as answer:
                async for line in answer.lines():
                    streak = 0 if line.startswith((":", "data:")) else streak
                    if (event := parser.feed(line)) is not None:
                        yield event
                if answer.status == NO_CONTENT:
                    return
        except RateLimited as error:
            wait_s = float(str(error.facts.get("retry_after_s", 1)))
        except StreamIdle:
            pass  # servers write a line every 15 s, so the connection is dead: reconnect below
        except Unavailable as error:
            if on_unavailable is not None and not streak:
                on_unavailable(error)
        streak = streak + 1 if on_unavailable is None else min(streak + 1, STREAM_FAILURES_MAX)
        await http.pause(streak, wait_s)
