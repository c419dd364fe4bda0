"""The parts of a stored output, for scanners that run in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from rota.infra.blob_store import BlobStore
from rota.policy.output.parts import OutputFile, OutputParts


async def stored_parts(
    store: BlobStore, value: bytes | None, value_at: str | None, files: Sequence[tuple[str, str]]
) -> OutputParts:
    """The value is read now; files (name, pointer) when their chunks are asked for, in another thread."""
    if value is None and value_at is not None:
        value = await store.get(value_at)
    read = partial(store.read_in_thread, loop=asyncio.get_running_loop())
    return OutputParts(value, tuple(OutputFile(name, partial(read, pointer)) for name, pointer in files))
