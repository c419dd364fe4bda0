"""A value of the blob store as a response, in parts: memory does not depend on its size."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Final

from litestar.response import Stream

from rota.infra.blob_store import BlobPointer, BlobStore
from rota.server.http.codec import ApiRequest

OCTET_STREAM: Final = "application/octet-stream"


async def stream_blob(request: ApiRequest, store: BlobStore, pointer: str) -> Stream:
    """Reads the first part, so that a missing value is a problem document. A value that turns out to be corrupted ends
    before its content length: the client sees an incomplete response, never wrong content."""
    size = BlobPointer.parse(pointer).size
    if request.is_head:
        return _stream(_each([]), size)
    parts = store.read(pointer)
    first = await anext(parts)
    return _stream(_chain(first, parts), size)


def stream_bytes(data: bytes) -> Stream:
    """A value that is in memory, as the same kind of response."""
    return _stream(_each([data]), len(data))


def _stream(parts: AsyncIterator[bytes], size: int) -> Stream:
    return Stream(parts, media_type=OCTET_STREAM, headers={"content-length": str(size)})


async def _chain(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    async with aclosing(rest) as parts:
        yield first
        async for part in parts:
            yield part


async def _each(parts: Sequence[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
