"""The audit log on a real server: entries commit with their change, are immutable and can be verified."""

import asyncio
import tracemalloc
from importlib import import_module

import asyncpg
import pytest

from rota.infra import audit
from rota.infra.audit import AuditEntry, ChainHead
from rota.infra.audit.verify import CHUNK_ROWS
from rota.infra.postgres.sql import parse_query
from rota.model.errors import InvalidInput, PostgresBusy


def sql(text):
    return parse_query("test", f"-- Test.\n{text}")


def entry(action="cap.raise", **detail):
    return AuditEntry("ann", action, "show:duck", detail)


async def append(database, *entries):
    async with database.transaction() as tx:
        return await audit.append(tx, entries)


async def test_audit_entries_appended_are_numbered_chained_and_verified(database):
    first = await append(database, entry(before=1, after=2), entry("job.cancel"))
    second = await append(database, entry())
    assert (first.seq, second.seq) == (2, 3)
    report = await audit.verify(database)
    assert (report.ok, report.checked, report.head) == (True, 3, second)
    row = await database.row(sql("SELECT actor, action, target, detail FROM rota.audit WHERE seq = 1"))
    assert tuple(row) == ("ann", "cap.raise", "show:duck", '{"after": 2, "before": 1}')


async def test_empty_audit_log_verifies_as_ok(database):
    report = await audit.verify(database)
    assert (report.ok, str(report.head)) == (True, f"0:{'00' * 32}")


async def test_audit_entry_and_its_change_commit_in_one_transaction(database):
    async def append_and_fail():
        async with database.transaction() as tx:
            await audit.append(tx, [entry()])
            raise LookupError

    with pytest.raises(LookupError):
        await append_and_fail()
    assert (await append(database, entry())).seq == 1
    assert (await audit.verify(database)).ok


async def test_concurrent_audit_writers_produce_one_chain(database):
    await asyncio.gather(*(append(database, entry(writer=n), entry(writer=n)) for n in range(12)))
    report = await audit.verify(database)
    assert (report.ok, report.checked) == (True, 24)


async def test_audit_writer_with_stale_snapshot_is_refused_and_does_not_fork_the_chain(database):
    async def append_late():
        async with database.transaction("repeatable read") as tx:
            await tx.value(sql("SELECT 1"))
            await append(database, entry())
            await audit.append(tx, [entry()])

    with pytest.raises(PostgresBusy, match="could not serialize"):
        await append_late()
    assert (await audit.verify(database)).checked == 1


async def test_audit_entries_cannot_be_changed_or_deleted(database):
    await append(database, entry())
    for statement in (
        "UPDATE rota.audit SET actor = 'bob'",
        "DELETE FROM rota.audit",
        "TRUNCATE rota.audit",
        "DELETE FROM rota.audit_head",
        "TRUNCATE rota.audit_head",
    ):
        with pytest.raises(asyncpg.PostgresError, match="is append-only"):
            await database.run(sql(statement))
    assert (await audit.verify(database)).checked == 1


async def test_secrets_in_target_or_detail_are_not_stored_in_the_audit_log(database):
    secret = AuditEntry(
        "ann", "redis.set", "redis://:hush-hush@host/0", {"password": "hush-hush", "nested": {"api_key": "hush-hush"}}
    )
    await append(database, secret)
    row = await database.row(sql("SELECT * FROM rota.audit"))
    assert "hush-hush" not in str(dict(row))
    assert (await audit.verify(database)).ok


async def test_secrets_in_actor_or_action_are_masked(database):
    await append(database, AuditEntry("http://ann:hush-hush@host/", "login password=hush-hush", "show:duck"))
    row = await database.row(sql("SELECT actor, action FROM rota.audit"))
    assert tuple(row) == ("http://ann:***@host/", "login password=***")


async def test_audit_entry_that_postgresql_cannot_store_is_refused_with_a_message(database):
    in_actor = [AuditEntry(hostile, "act", "target") for hostile in ("nul\0", "half\ud800")]
    in_detail = [AuditEntry("ann", "act", "target", {"name": bad.actor}) for bad in in_actor]
    for bad in in_actor + in_detail:
        with pytest.raises(InvalidInput, match="cannot store"):
            await append(database, bad)
    assert (await audit.verify(database)).head.seq == 0


async def test_long_audit_log_is_verified_in_chunks_and_from_any_entry(database):
    head = await append(database, *(entry(n=n) for n in range(CHUNK_ROWS + 5)))
    assert (await audit.verify(database)).checked == CHUNK_ROWS + 5
    report = await audit.verify(database, from_seq=CHUNK_ROWS)
    assert (report.ok, report.checked, report.head) == (True, 6, head)
    beyond = await audit.verify(database, from_seq=CHUNK_ROWS + 50)
    assert beyond.problem.why == "gap"


async def test_large_audit_entries_are_read_in_chunks_of_bounded_size(database, monkeypatch):
    monkeypatch.setattr(import_module("rota.infra.audit.verify"), "CHUNK_BYTES", 100_000)
    head = await append(database, *(entry(text="x" * 40_000) for _ in range(100)), entry(text="x" * 150_000))
    tracemalloc.start()
    try:
        report = await audit.verify(database)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (report.ok, report.checked, report.head) == (True, 101, head)
    assert peak < 1_500_000, "loading all entries at once takes more than 4 MB"


def test_chain_head_round_trips_through_text():
    head = ChainHead(7, bytes(range(32)))
    assert ChainHead.parse(f" {head}\n") == head


@pytest.mark.parametrize("text", ["", "7", "7:", "7:zz", "x:00", f"-1:{'00' * 32}", f"7:{'00' * 31}"])
def test_invalid_chain_head_text_is_refused(text):
    with pytest.raises(InvalidInput, match="SEQ:HASH"):
        ChainHead.parse(text)
