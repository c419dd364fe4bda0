"""Streams of bytes as text: one after the other, or all at once as they come."""

from __future__ import annotations

import asyncio
from codecs import getincrementaldecoder
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Final

_Utf8Decoder = getincrementaldecoder("utf-8")
_END_OF_STREAM: Final = ""


async def read_in_order(streams: Sequence[AsyncIterator[bytes]]) -> AsyncIterator[str]:
    """One after the other."""
    for stream in streams:
        async for text in _decode_text(stream):
            yield text


async def merge_streams(streams: Sequence[AsyncIterator[bytes]]) -> AsyncIterator[str]:
    """Each piece when it comes; ends with the last stream, or as soon as one fails. Nothing is read ahead but one piece
    of each."""
    texts = [_decode_text(stream) for stream in streams]
    coming = {asyncio.create_task(_next_text(text)): text for text in texts}
    try:
        while coming:
            done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                text = coming.pop(task)
                if (piece := task.result()) != _END_OF_STREAM:
                    coming[asyncio.create_task(_next_text(text))] = text
                    yield piece
    finally:
        for task in coming:
            task.cancel()
        await asyncio.gather(*coming, return_exceptions=True)
        for text in texts:
            await text.aclose()


async def _next_text(text: AsyncIterator[str]) -> str:
    return await anext(text, _END_OF_STREAM)


async def _decode_text(stream: AsyncIterator[bytes]) -> AsyncGenerator[str, None]:
    """A character that is cut in two comes with its second half. No piece is empty."""
    decoder = _Utf8Decoder(errors="replace")
    async for data in stream:
        if text := decoder.decode(data):
            yield text
    if text := decoder.decode(b"", final=True):
        yield text
