"""The store: `put` returns a pointer, `get` returns what it points to, verified.

Small values lie in PostgreSQL and come with the transaction that refers to them; large ones in files of a directory
that all replicas share, when one is set. A file is there before the pointer to it is committed; if that never happens
it is one that nobody uses, and the sweep removes it. What is in use is never removed, however old.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from rota.infra import failpoints
from rota.infra.blob_store import table
from rota.infra.blob_store.files import BlobDirectory
from rota.infra.blob_store.pointers import BlobLocation, BlobPointer, pointer_to
from rota.infra.clock import Clock, SystemClock
from rota.infra.postgres import Database, Transaction
from rota.model.errors import InvalidInput, SetupFailed

FILE_TIMEOUT_S: Final = 30.0
"""Longest wait for a file; a directory that takes longer is not there."""
SWEEP_TIMEOUT_S: Final = 3600.0
T = TypeVar("T")


class BlobStoreTarget(msgspec.Struct, frozen=True, kw_only=True):
    directory: Path | None = None
    """For large values; without one PostgreSQL takes all."""
    small_bytes: int = 256 * 1024
    """What is not larger lies in PostgreSQL."""
    most_bytes: int = 16 * 1024 * 1024


class BlobStore:
    def __init__(
        self, database: Database, target: BlobStoreTarget | None = None, *, clock: Clock | None = None
    ) -> None:
        self.database = database
        self.target = target or BlobStoreTarget()
        self._clock = clock or SystemClock()
        self._files = BlobDirectory(self.target.directory) if self.target.directory is not None else None

    async def put(self, values: Sequence[bytes], *, on: Transaction | None = None) -> list[str]:
        """Pointers to the values, in their order; what goes to PostgreSQL is there once the transaction commits."""
        for data in values:
            if len(data) > self.target.most_bytes:
                raise InvalidInput(
                    f"A value of {len(data)} bytes is too large for the store, at most {self.target.most_bytes} are"
                    " allowed: write it elsewhere, and pass where it is."
                )
        pointers = [pointer_to(data, self._location_for(data)) for data in values]
        small = [data for data, pointer in zip(values, pointers, strict=True) if pointer.where is BlobLocation.POSTGRES]
        for data, pointer in zip(values, pointers, strict=True):
            if pointer.where is BlobLocation.FILE and self._files is not None:
                await _in_thread(partial(self._files.put, pointer, data))
        failpoints.hit("store.after_files_before_table")
        if small:
            await (on or self.database).run(table.PUT, *table.put_arguments(small)[1])
        return [str(pointer) for pointer in pointers]

    async def get(self, pointer: str, *, on: Transaction | None = None) -> bytes:
        at = BlobPointer.parse(pointer)
        if at.where is BlobLocation.POSTGRES:
            return await table.get(on or self.database, at)
        if self._files is None:
            raise SetupFailed(f"{at} lies in a file, and this process has no directory of the store: set it.")
        return await _in_thread(partial(self._files.get, at))

    async def maintain(self, retention_s: float, used: Collection[str]) -> None:
        """Make days ahead, and forget what is past its retention and not among the pointers that are in use."""
        now_s = self._clock.now_ms() / 1000
        kept = [BlobPointer.parse(pointer) for pointer in used]
        by_place = {where: {each.sha256 for each in kept if each.where is where} for where in BlobLocation}
        async with self.database.transaction() as tx:
            await table.create_partitions(tx, datetime.fromtimestamp(now_s, UTC).date())
            before = datetime.fromtimestamp(now_s - retention_s, UTC)
            await table.drop_expired(tx, before, by_place[BlobLocation.POSTGRES])
        failpoints.hit("store.after_table_before_sweep")
        if self._files is not None:
            sweep = partial(self._files.sweep, now_s - retention_s, now_s, by_place[BlobLocation.FILE])
            await _in_thread(sweep, most_s=SWEEP_TIMEOUT_S)

    def _location_for(self, data: bytes) -> BlobLocation:
        return (
            BlobLocation.FILE
            if self._files is not None and len(data) > self.target.small_bytes
            else BlobLocation.POSTGRES
        )


async def _in_thread(work: Callable[[], T], most_s: float = FILE_TIMEOUT_S) -> T:
    try:
        async with asyncio.timeout(most_s):
            return await asyncio.to_thread(work)
    except TimeoutError as error:
        raise SetupFailed("The store's directory does not answer: look at the file system it lies on.") from error
