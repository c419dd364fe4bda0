"""Blobs in PostgreSQL, in `rota.blob`: one partition per day.

A value put again on a later day is stored twice, so that it lives as long as its last writer needs it. An expired day
is dropped as a whole; values still in use are copied first, in the same transaction. Partitions are created ahead; rows
without a partition go to the default partition, which is never dropped but swept row by row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import date, datetime, timedelta

from rota.infra.blob_store.pointers import BlobLocation, BlobPointer, pointer_to
from rota.infra.postgres import Database, Transaction, query
from rota.model.errors import BlobMissing

PUT = query(__package__, "blob_put")
GET = query(__package__, "blob_get")
SLICE = query(__package__, "blob_slice")
DAYS = query(__package__, "blob_days")
MAKE_DAY = query(__package__, "blob_make_day")
DROP_DAY = query(__package__, "blob_drop_day")
CARRY_OVER = query(__package__, "blob_carry")
SWEEP = query(__package__, "blob_sweep")

DAYS_AHEAD = 3
SWEEP_ROWS = 1_000


def put_arguments(data: Sequence[bytes]) -> tuple[list[BlobPointer], tuple[object, ...]]:
    """Pointers to the data, and the arguments of PUT that store it."""
    pointers = [pointer_to(each, BlobLocation.POSTGRES) for each in data]
    return pointers, ([pointer.sha256 for pointer in pointers], list(data))


async def get(database: Database | Transaction, pointer: BlobPointer) -> bytes:
    data = await database.value(GET, pointer.sha256)
    if data is None:
        raise _missing(pointer)
    return pointer.verify(bytes(data))


async def get_slice(database: Database | Transaction, pointer: BlobPointer, at: int, size: int) -> bytes:
    """`size` bytes from offset `at`; fewer at the end. Unverified."""
    data = await database.value(SLICE, pointer.sha256, at + 1, size)
    if data is None:
        raise _missing(pointer)
    return bytes(data)


def _missing(pointer: BlobPointer) -> BlobMissing:
    return BlobMissing(f"The value {pointer} is no longer stored.", pointer=str(pointer))


async def create_partitions(on: Transaction, today: date) -> None:
    for ahead in range(1, DAYS_AHEAD + 1):
        await on.value(MAKE_DAY, today + timedelta(days=ahead))


async def drop_expired(on: Transaction, before: datetime, used: Iterable[bytes]) -> int:
    """Delete unused values put before `before`; returns the number of days dropped."""
    used_hashes = list(used)
    days = [row["day"] for row in await on.rows(DAYS, before)]
    for day in days:
        await on.run(CARRY_OVER, day, used_hashes)
        await on.value(DROP_DAY, day)
    await on.run(SWEEP, before, used_hashes, SWEEP_ROWS)
    return len(days)
