"""The blob store: a pointer returns the stored bytes or an error, and blobs in use are never deleted."""

import asyncio
import os
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from hashlib import sha256

import pytest

from rota.infra.blob_store import BlobLocation, BlobPointer, BlobStore, BlobStoreTarget, pointer_to
from rota.infra.blob_store import store as blob_store
from rota.model.errors import BlobCorrupted, BlobMissing, InvalidInput, SetupFailed
from tests.support.queue import sql

pytestmark = pytest.mark.no_days
SMALL, LARGE = b"small", b"large" * 100
DAY_S = 86_400.0
ROWS = sql("SELECT count(*) FROM rota.blob")
PARTITIONS = sql("SELECT relname FROM pg_class WHERE relname ~ '^blob_2[0-9]+$' AND relkind = 'r' ORDER BY 1")


class ShiftedClock:
    """A clock that differs from real time by `days`."""

    def __init__(self, days=0.0):
        self.days = days

    def now_ms(self):
        return int((datetime.now(UTC) + timedelta(days=self.days)).timestamp() * 1000)


@pytest.fixture
def store(database, tmp_path):
    return BlobStore(database, BlobStoreTarget(directory=tmp_path, small_bytes=100, most_bytes=1000))


def files(directory):
    return sorted(path for path in directory.rglob("*") if path.is_file())


async def test_small_blobs_are_stored_in_postgresql_and_large_ones_in_files(store, database, tmp_path):
    small, large = await store.put([SMALL, LARGE])
    assert small == f"pg:{sha256(SMALL).hexdigest()}:5"
    assert large == f"file:{sha256(LARGE).hexdigest()}:500"
    assert await store.get(small) == SMALL
    assert await store.get(large) == LARGE
    assert await database.value(ROWS) == 1
    assert [path.name for path in files(tmp_path)] == [sha256(LARGE).hexdigest()]


async def test_blobs_are_read_in_parts_and_verified_before_the_last(store, database, tmp_path, monkeypatch):
    monkeypatch.setattr(blob_store, "PART_BYTES", 64)
    medium = bytes(range(100))
    for pointer, data in zip(await store.put([LARGE, medium, SMALL, b""]), (LARGE, medium, SMALL, b""), strict=True):
        parts = [part async for part in store.read(pointer)]
        assert (b"".join(parts), max(map(len, parts)) <= 64) == (data, True)
    [path] = files(tmp_path)
    path.write_bytes(LARGE[:-1] + b"!")
    parts = store.read(str(pointer_to(LARGE, BlobLocation.FILE)))
    assert LARGE.startswith(b"".join([await anext(parts) for _ in range(len(LARGE) // 64)]))
    with pytest.raises(BlobCorrupted):
        await anext(parts)
    path.unlink()
    for pointer in (pointer_to(LARGE, BlobLocation.FILE), pointer_to(b"never put", BlobLocation.POSTGRES)):
        with pytest.raises(BlobMissing):
            await anext(store.read(str(pointer)))


async def test_blob_store_without_directory_stores_everything_in_postgresql(database):
    store = BlobStore(database)
    pointers = await store.put([LARGE, b""])
    assert [await store.get(pointer) for pointer in pointers] == [LARGE, b""]
    with pytest.raises(SetupFailed, match="no store directory"):
        await store.get(str(pointer_to(LARGE, BlobLocation.FILE)))


async def test_put_file_stores_a_copy_under_the_hash_of_the_bytes_read(store, tmp_path):
    (tmp_path / "given").write_bytes(LARGE)
    pointer = store._files.put_file(tmp_path / "given", 10_000)
    (tmp_path / "given").write_bytes(b"changed")
    assert pointer == pointer_to(LARGE, BlobLocation.FILE)
    assert await store.get(str(pointer)) == LARGE
    assert store._files.put_file(tmp_path / "given", 7) == pointer_to(b"changed", BlobLocation.FILE)
    before = set(files(tmp_path))
    with pytest.raises(InvalidInput, match="larger than 6 bytes"):
        store._files.put_file(tmp_path / "given", 6)
    assert set(files(tmp_path)) == before, "no temporary file is left"


async def test_identical_blobs_are_stored_once(store, database, tmp_path):
    assert len({*await store.put([SMALL, SMALL]), *await store.put([SMALL])}) == 1
    await asyncio.gather(*(store.put([LARGE]) for _ in range(5)))
    assert await database.value(ROWS) == 1
    assert len(files(tmp_path)) == 1


async def test_blob_commits_or_rolls_back_with_the_callers_transaction(store, database):
    async with database.transaction() as tx:
        [pointer] = await store.put([SMALL], on=tx)
        assert await store.get(pointer, on=tx) == SMALL
    assert await store.get(pointer) == SMALL
    with suppress(RuntimeError):
        async with database.transaction() as tx:
            [other] = await store.put([b"never"], on=tx)
            raise RuntimeError
    with pytest.raises(BlobMissing):
        await store.get(other)


async def test_blob_over_the_size_limit_is_refused_and_nothing_is_stored(store, database, tmp_path):
    with pytest.raises(InvalidInput, match="1001 bytes is too large"):
        await store.put([SMALL, b"x" * 1001])
    assert await database.value(ROWS) == 0
    assert files(tmp_path) == []


async def test_blob_modified_outside_the_store_is_not_returned(store, database, tmp_path):
    small, large = await store.put([SMALL, LARGE])
    await database.run(sql("UPDATE rota.blob SET data = 'other'"))
    [file] = files(tmp_path)
    file.write_bytes(LARGE[:-1] + b"X")
    for pointer in (small, large):
        with pytest.raises(BlobCorrupted, match="not what was written"):
            await store.get(pointer)


@pytest.mark.parametrize(
    "text", ["", "pg:", "s3:x", "pg:zz:5", f"pg:{'a' * 64}", f"pg:{'a' * 64}:-1", "file:../../x:1"]
)
async def test_invalid_blob_pointer_is_refused(store, text):
    with pytest.raises(InvalidInput, match="not a pointer"):
        await store.get(text)


async def test_absent_blob_raises_blob_missing(store):
    for where in BlobLocation:
        with pytest.raises(BlobMissing, match="no longer stored"):
            await store.get(str(pointer_to(b"never put", where)))


async def test_blob_store_with_unusable_directory_raises_setup_failed(database, tmp_path):
    (tmp_path / "file").write_text("no directory")
    store = BlobStore(database, BlobStoreTarget(directory=tmp_path / "file", small_bytes=1))
    with pytest.raises(SetupFailed, match="cannot be used"):
        await store.put([LARGE])


async def test_maintenance_deletes_old_files_unless_in_use_or_put_again(store, tmp_path):
    old, used, again = await store.put([b"o" * 200, b"u" * 200, b"a" * 200])
    stale = files(tmp_path)[0].parent / ".tmp-dead"
    stale.write_bytes(b"half")
    for path in files(tmp_path):
        os.utime(path, (1, 1))
    await store.put([b"a" * 200])
    await store.maintain(30 * DAY_S, [used])
    assert {path.name for path in files(tmp_path)} == {BlobPointer.parse(each).sha256.hex() for each in (used, again)}
    with pytest.raises(BlobMissing):
        await store.get(old)


async def test_file_put_during_maintenance_is_not_deleted(store, tmp_path, monkeypatch):
    [pointer] = await store.put([LARGE])
    [path] = files(tmp_path)
    os.utime(path, (1, 1))
    rename = type(path).rename

    def put_in_between(self, target):
        os.utime(self)
        return rename(self, target)

    monkeypatch.setattr(type(path), "rename", put_in_between)
    await store.maintain(30 * DAY_S, [])
    monkeypatch.undo()
    assert await store.get(pointer) == LARGE


async def test_partitions_past_retention_are_dropped_after_blobs_in_use_are_copied(database, tmp_path):
    past_store = BlobStore(database, clock=ShiftedClock(-40))
    await past_store.maintain(30 * DAY_S, [])
    partitions = [row["relname"] for row in await database.rows(PARTITIONS)]
    assert len(partitions) == 3, "partitions made in advance by a clock 40 days behind"
    used, unused = str(pointer_to(b"used", BlobLocation.POSTGRES)), str(pointer_to(b"unused", BlobLocation.POSTGRES))
    await BlobStore(database).put([b"used", b"unused"])
    await database.run(sql("UPDATE rota.blob SET ts_put = now() - interval '38 days'"))
    assert await database.value(sql(f"SELECT count(*) FROM rota.{partitions[1]}")) == 2

    await BlobStore(database).maintain(30 * DAY_S, [used])
    assert not set(partitions) & {row["relname"] for row in await database.rows(PARTITIONS)}
    assert await BlobStore(database).get(used) == b"used"
    with pytest.raises(BlobMissing):
        await BlobStore(database).get(unused)


async def test_blobs_in_the_default_partition_expire_row_by_row(database):
    store = BlobStore(database)
    kept, young, _ = await store.put([b"kept", b"young", b"old"])
    await database.run(sql("UPDATE rota.blob SET ts_put = now() - interval '31 days' WHERE data <> 'young'"))
    await store.maintain(30 * DAY_S, [kept])
    assert await database.value(ROWS) == 2
    assert [await store.get(pointer) for pointer in (kept, young)] == [b"kept", b"young"]
