"""Decodes byte streams as text: concatenated, or merged as data arrives."""

from __future__ import annotations

import asyncio
from codecs import getincrementaldecoder
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Final

_Utf8Decoder = getincrementaldecoder("utf-8")
_END_OF_STREAM: Final = ""


async def read_in_order(streams: Sequence[AsyncIterator[bytes]]) -> AsyncIterator[str]:
    """The streams one after the other."""
    for stream in streams:
        async for text in _decode_text(stream):
            yield text


async def merge_streams(streams: Sequence[AsyncIterator[bytes]]) -> AsyncIterator[str]:
    """Yields chunks as they arrive; ends with the last stream or at the first error. Reads one chunk ahead."""
    texts = [_decode_text(stream) for stream in streams]
    pending = {asyncio.create_task(_next_text(text)): text for text in texts}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                text = pending.pop(task)
                if (chunk := task.result()) != _END_OF_STREAM:
                    pending[asyncio.create_task(_next_text(text))] = text
                    yield chunk
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for text in texts:
            await text.aclose()


async def _next_text(text: AsyncIterator[str]) -> str:
    return await anext(text, _END_OF_STREAM)


async def _decode_text(stream: AsyncIterator[bytes]) -> AsyncGenerator[str, None]:
    """Yields non-empty chunks; a character split between two chunks is part of the second."""
    decoder = _Utf8Decoder(errors="replace")
    async for data in stream:
        if text := decoder.decode(data):
            yield text
    if text := decoder.decode(b"", final=True):
        yield text
