"""The blob store: `put` returns a pointer, `get` returns the verified value, `read` the same in parts.

Small values are stored in PostgreSQL, in the transaction that refers to them; large ones in files of a directory shared
by all replicas, if one is configured. A file exists before the pointer to it commits; without that commit it is unused,
and the sweep removes it. A value in use is never removed, whatever its age.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from rota.infra import failpoints
from rota.infra.blob_store import table
from rota.infra.blob_store.files import BlobDirectory
from rota.infra.blob_store.pointers import BlobDigest, BlobLocation, BlobPointer, pointer_to
from rota.infra.clock import Clock, SystemClock
from rota.infra.postgres import Database, Transaction
from rota.model.errors import InvalidInput, SetupFailed

PART_BYTES: Final = 1024 * 1024
FILE_TIMEOUT_S: Final = 30.0
"""Longest wait for a file; a slower directory counts as unavailable."""
PARTS_TIMEOUT_S: Final = 300.0
SWEEP_TIMEOUT_S: Final = 3600.0
T = TypeVar("T")


class BlobStoreTarget(msgspec.Struct, frozen=True, kw_only=True):
    directory: Path | None = None
    """For large values; without one PostgreSQL stores all."""
    small_bytes: int = 256 * 1024
    """Values up to this size are stored in PostgreSQL."""
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
        """Pointers to the values, in order; those in PostgreSQL exist once the transaction commits."""
        for data in values:
            if len(data) > self.target.most_bytes:
                raise InvalidInput(
                    f"A value of {len(data)} bytes is too large for the store, at most {self.target.most_bytes} are"
                    " allowed: write it elsewhere, and pass its location."
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

    async def put_parts(self, parts: Callable[[], Iterator[bytes]], *, on: Transaction | None = None) -> str:
        """As `put`, for one value whose parts are produced in a thread, possibly twice. A file is never in memory as a
        whole."""
        most_bytes = self.target.most_bytes
        small = await _in_thread(
            partial(_join_small, parts, most_bytes if self._files is None else self.target.small_bytes), PARTS_TIMEOUT_S
        )
        if small is not None:
            [pointer] = await self.put([small], on=on)
            return pointer
        files = self._files
        if files is None:
            raise InvalidInput(f"The value is larger than {most_bytes} bytes, the store's limit for one value.")
        return str(await _in_thread(lambda: files.put_parts(parts(), most_bytes), PARTS_TIMEOUT_S))

    async def get(self, pointer: str, *, on: Transaction | None = None) -> bytes:
        location = BlobPointer.parse(pointer)
        if location.where is BlobLocation.POSTGRES:
            return await table.get(on or self.database, location)
        return await _in_thread(partial(self._require_files(location).get, location))

    async def read(self, pointer: str) -> AsyncGenerator[bytes, None]:
        """The value in parts of at most `PART_BYTES`, at least one. The last part is yielded only after the whole value
        was verified, so a reader that gets all bytes has the right ones."""
        location = BlobPointer.parse(pointer)
        digest, held_back = BlobDigest(location), b""
        async with aclosing(self._parts(location)) as parts:
            async for part in parts:
                digest.update(part)
                if held_back:
                    yield held_back
                held_back = part
        digest.verify()
        yield held_back

    async def _parts(self, location: BlobPointer) -> AsyncGenerator[bytes, None]:
        if location.where is BlobLocation.POSTGRES:
            for at in range(0, location.size, PART_BYTES):
                yield await table.get_slice(self.database, location, at, PART_BYTES)
            return
        files = self._require_files(location)
        file = await _in_thread(partial(files.open, location))
        with file:
            while part := await _in_thread(partial(files.read_part, file, PART_BYTES)):
                yield part

    def read_in_thread(self, pointer: str, loop: asyncio.AbstractEventLoop) -> Iterator[bytes]:
        """As `read`, for a thread that is not that of the loop: it reads files itself, and the loop PostgreSQL."""
        location = BlobPointer.parse(pointer)
        digest, held_back = BlobDigest(location), b""
        for part in self._parts_in_thread(location, loop):
            digest.update(part)
            if held_back:
                yield held_back
            held_back = part
        digest.verify()
        yield held_back

    def _parts_in_thread(self, location: BlobPointer, loop: asyncio.AbstractEventLoop) -> Iterator[bytes]:
        if location.where is BlobLocation.POSTGRES:
            for at in range(0, location.size, PART_BYTES):
                reading = table.get_slice(self.database, location, at, PART_BYTES)
                yield asyncio.run_coroutine_threadsafe(reading, loop).result(FILE_TIMEOUT_S)
            return
        files = self._require_files(location)
        with files.open(location) as file:
            while part := files.read_part(file, PART_BYTES):
                yield part

    def _require_files(self, location: BlobPointer) -> BlobDirectory:
        if self._files is None:
            raise SetupFailed(
                f"{location} is stored in a file, but this process has no store directory: set store.directory."
            )
        return self._files

    async def maintain(self, retention_s: float, used: Collection[str]) -> None:
        """Create partitions ahead, and delete expired values that are not among the `used` pointers."""
        now_s = self._clock.now_ms() / 1000
        used_pointers = [BlobPointer.parse(pointer) for pointer in used]
        used_by_location = {
            where: {each.sha256 for each in used_pointers if each.where is where} for where in BlobLocation
        }
        async with self.database.transaction() as tx:
            await table.create_partitions(tx, datetime.fromtimestamp(now_s, UTC).date())
            before = datetime.fromtimestamp(now_s - retention_s, UTC)
            await table.drop_expired(tx, before, used_by_location[BlobLocation.POSTGRES])
        failpoints.hit("store.after_table_before_sweep")
        if self._files is not None:
            sweep = partial(self._files.sweep, now_s - retention_s, now_s, used_by_location[BlobLocation.FILE])
            await _in_thread(sweep, timeout_s=SWEEP_TIMEOUT_S)

    def _location_for(self, data: bytes) -> BlobLocation:
        return (
            BlobLocation.FILE
            if self._files is not None and len(data) > self.target.small_bytes
            else BlobLocation.POSTGRES
        )


def _join_small(parts: Callable[[], Iterator[bytes]], most_bytes: int) -> bytes | None:
    """The value, unless it is larger."""
    joined = b""
    for part in parts():
        joined += part
        if len(joined) > most_bytes:
            return None
    return joined


async def _in_thread(work: Callable[[], T], timeout_s: float = FILE_TIMEOUT_S) -> T:
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.to_thread(work)
    except TimeoutError as error:
        raise SetupFailed("The store's directory does not respond: check its file system.") from error
