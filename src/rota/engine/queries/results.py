"""Results of a job's frames in pages: return values, or failures.

A page ends early when its values become too large, and the next one continues there. A frame that succeeded without a
return value has no result.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec

from rota.api.job_results import FrameResult, FrameResultPage
from rota.api.jobs import JobView, Layer
from rota.engine.queries.jobs import FrameEnd, JobQueries
from rota.infra.blob_store import BlobStore
from rota.model.errors import BlobMissing, InvalidInput, SetupFailed
from rota.model.policy.outputs import read_refusal

PAGE_BYTES_MAX: Final = 16 * 1024 * 1024
_FRAME_LAST: Final = 2**31


class FrameResultReader:
    def __init__(self, jobs: JobQueries, store: BlobStore) -> None:
        self._jobs = jobs
        self._store = store

    async def page(
        self, job: JobView, *, after: str | None = None, most: int = 100, frame: int | None = None
    ) -> FrameResultPage:
        """The page at the cursor `after`; of one frame if `frame` is given."""
        items: list[FrameResult] = []
        size = 0
        begin = _parse_cursor(after)
        async for layer, end in self._frame_ends(job, begin, most + 1, frame):
            if len(items) == most or size > PAGE_BYTES_MAX:
                return FrameResultPage(items, f"{layer.number}.{end.frame}")
            data, problem = await self._value(job, layer, end)
            size += len(data or b"")
            items.append(_frame_result(layer, end, data, problem))
        return FrameResultPage(items)

    async def _frame_ends(
        self, job: JobView, begin: tuple[int, int], most: int, frame: int | None
    ) -> AsyncIterator[tuple[Layer, FrameEnd]]:
        for layer in job.layers:
            if layer.number < begin[0]:
                continue
            first = begin[1] if layer.number == begin[0] else 0
            only = None if frame is None else layer.frames.queue_number(frame)
            if frame is not None and (only is None or only < first):
                continue
            arguments = {"frame": first, "most": most} if only is None else {"frame": only, "most": 1}
            for end in await self._jobs.frame_ends(layer.id, **arguments):
                if only is None or end.frame == only:
                    yield layer, end

    async def _value(self, job: JobView, layer: Layer, end: FrameEnd) -> tuple[bytes | None, str | None]:
        refusal = read_refusal(end.output, job.id, layer.frames.number(end.frame))
        if refusal is not None:
            return None, refusal.sentence
        if end.value_at is None:
            return end.value, None
        try:
            return await self._store.get(end.value_at), None
        except (BlobMissing, SetupFailed, InvalidInput) as error:
            return None, error.sentence


def _frame_result(layer: Layer, end: FrameEnd, data: bytes | None, problem: str | None) -> FrameResult:
    value, raw = _decode_value(data)
    return FrameResult(
        layer=layer.name,
        number=layer.number,
        place=layer.frames.index(end.frame),
        frame=layer.frames.number(end.frame),
        attempt=end.attempt,
        state=end.state,
        value=value,
        raw=raw,
        code=end.code,
        error=end.error,
        problem=problem,
        output=end.output,
        took_ms=end.took_ms,
    )


def _decode_value(data: bytes | None) -> tuple[Any, bytes | None]:
    if data is None:
        return None, None
    try:
        value = msgspec.msgpack.decode(data)
        msgspec.json.encode(value)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError):
        return None, data
    return value, None


def _parse_cursor(text: str | None) -> tuple[int, int]:
    if text is None:
        return 0, 0
    layer, dot, frame = text.partition(".")
    if dot and layer.isascii() and frame.isascii() and layer.isdecimal() and frame.isdecimal():
        numbers = int(layer[:10]), int(frame[:10])
        if max(numbers) < _FRAME_LAST:
            return numbers
    raise InvalidInput(f"{text[:40]!r} is not a valid cursor: pass `next` of the previous page unchanged.")
