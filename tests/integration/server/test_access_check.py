"""API key checks: accepted, refused, cached and invalidated, also while PostgreSQL is down."""

import asyncio
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
from structlog.testing import capture_logs

from rota.accounting.admin import QuotaAdmin
from rota.infra.postgres import Database, PostgresTarget
from rota.infra.service import Lifecycle
from rota.model.access import GrantSpec, Role
from rota.model.errors import PostgresUnavailable, Unauthenticated, Unavailable
from rota.model.identity.api_key_format import ALPHABET, ENTROPY_BYTES, new_key
from rota.server.access import ApiKeyStore, KeyCheck, PrincipalStore
from rota.server.access.check import CACHE_TTL_S, UNKNOWN_CACHE_MAX
from tests.contract.ledger_suite import sql
from tests.support.placement import ManualClock
from tests.support.waiting import until

EXPIRE = sql("UPDATE rota.api_key SET ts_expires = now() - interval '1 second' WHERE id = $1")
FORGED = sql("UPDATE rota.api_key SET digest = $2 WHERE id = $1")
USED = sql("SELECT extract(epoch FROM now() - ts_last_used)::float8 FROM rota.api_key WHERE id = $1")
BACKDATE = sql("UPDATE rota.api_key SET ts_last_used = now() - make_interval(secs => $2) WHERE id = $1")
KILL_OTHERS = sql(
    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
    " WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name = 'rota'"
)
NOTIFY_LAST = sql("SELECT pg_notify('rota_keys', 'last')")
VERSION = sql("SELECT xmin::text FROM rota.api_key WHERE id = $1")
ADMIN = [GrantSpec(Role.ADMIN)]
UNKNOWN_KEYS = [
    new_key(number.to_bytes(7, "big") + number.to_bytes(20, "big")) for number in range(UNKNOWN_CACHE_MAX + 100)
]


class CountingDatabase:
    """A database that records the queries sent to it."""

    def __init__(self, database):
        self._database = database
        self.queries = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def rows(self, query, keys):
        self.queries.append(list(keys))
        found = await self._database.rows(query, keys)
        await self.gate.wait()
        return found

    def __getattr__(self, name):
        return getattr(self._database, name)


@pytest.fixture
def keys(database):
    return ApiKeyStore(database)


@pytest.fixture
def counting_db(database):
    return CountingDatabase(database)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def key_check(counting_db, clock):
    return KeyCheck(counting_db, clock)


async def reason(key_check, text):
    with pytest.raises(Unauthenticated) as refused:
        await key_check.check(text)
    assert refused.value.sentence.count("\n") == 0
    if len(parts := text.split("_")) == 3:
        assert parts[2] not in refused.value.sentence
    return refused.value.facts["reason"]


@asynccontextmanager
async def watching_changes(key_check):
    draining, ready = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(key_check.watch_changes(Lifecycle(draining, ready.set)))
        await ready.wait()
        yield
        draining.set()


async def test_valid_key_is_queried_once_per_cache_ttl(key_check, counting_db, clock, keys):
    made = await keys.create("ci", ADMIN, actor="ann")
    assert [(await key_check.check(made.plain.text)).name for _ in range(3)] == ["ci"] * 3
    assert counting_db.queries == [[made.key.id]]
    clock.now_s += CACHE_TTL_S
    await key_check.check(made.plain.text)
    assert len(counting_db.queries) == 2


async def test_refusal_reason_is_disclosed_only_to_holder_of_the_secret(key_check, keys):
    made = [await keys.create(name, ADMIN, actor="ann") for name in ("good", "old", "gone")]
    good, old, gone = (each.plain for each in made)
    await keys.database.run(EXPIRE, old.id)
    await keys.revoke(gone.id, actor="ann")
    assert await reason(key_check, "hunter2") == "malformed"
    assert await reason(key_check, good.text[:-1] + ALPHABET[0 if good.text[-1] != ALPHABET[0] else 1]) == "mistyped"
    assert await reason(key_check, UNKNOWN_KEYS[0].text) == "unknown"
    assert (await reason(key_check, old.text), await reason(key_check, gone.text)) == ("expired", "revoked")
    for plain in (good, old, gone):
        # The same id with a wrong secret looks like an unknown key.
        await keys.database.run(FORGED, plain.id, UNKNOWN_KEYS[0].digest)
        key_check.invalidate()
        assert await reason(key_check, plain.text) == "unknown"


async def test_unknown_keys_are_cached_without_evicting_valid_ones(key_check, counting_db, keys):
    made = await keys.create("ci", ADMIN, actor="ann")
    await key_check.check(made.plain.text)
    for _ in range(3):
        assert await reason(key_check, UNKNOWN_KEYS[0].text) == "unknown"
    assert len(counting_db.queries) == 2
    for start in range(0, len(UNKNOWN_KEYS), 1000):
        await asyncio.gather(*(reason(key_check, key.text) for key in UNKNOWN_KEYS[start : start + 1000]))
    before = len(counting_db.queries)
    await key_check.check(made.plain.text)
    assert len(counting_db.queries) == before


async def test_concurrent_unknown_keys_share_a_few_sequential_queries(key_check, counting_db):
    counting_db.gate.clear()
    lookups = [asyncio.create_task(reason(key_check, key.text)) for key in UNKNOWN_KEYS[:1000]]
    await until(lambda: counting_db.queries, what="the first statement")
    assert len(counting_db.queries) == 1
    counting_db.gate.set()
    assert set(await asyncio.gather(*lookups)) == {"unknown"}
    assert len(counting_db.queries) <= 4


async def test_cancelled_caller_does_not_cancel_the_shared_lookup(key_check, counting_db, keys):
    made = await keys.create("ci", ADMIN, actor="ann")
    counting_db.gate.clear()
    first, second = (asyncio.create_task(key_check.check(made.plain.text)) for _ in range(2))
    await until(lambda: counting_db.queries, what="the first statement")
    first.cancel()
    counting_db.gate.set()
    assert (await second).name == "ci"
    assert first.cancelled()


LATE = new_key(bytes(range(ENTROPY_BYTES)))
CHANGES = {
    "revoked": lambda keys, key: keys.revoke(key.id, actor="ann"),
    "disabled": lambda keys, key: PrincipalStore(keys.database).disable(key.principal, actor="ann"),
    "expired": lambda keys, key: keys.database.run(EXPIRE, key.id),
    "renamed": lambda keys, _key: QuotaAdmin(keys.database).rename_show("film", "feature", actor="ann"),
    "deleted": lambda keys, _key: QuotaAdmin(keys.database).delete_show("film", actor="ann"),
    "created": lambda keys, _key: keys.add(LATE, "late", ADMIN, actor="ann"),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_key_change_notification_invalidates_cache_before_ttl(counting_db, clock, keys, change):
    await QuotaAdmin(keys.database).create_show("film", actor="ann")
    key_check = KeyCheck(counting_db, clock, remember_s=3600)
    made = await keys.create("ci", [GrantSpec(Role.VIEWER, "film")], actor="ann")
    async with watching_changes(key_check):
        before = [await answer(key_check, text) for text in (made.plain.text, LATE.text)]
        assert before == ["viewer in film", "unknown"]
        await CHANGES[change](keys, made.key)
        after = [{"renamed": "viewer in feature", "deleted": ""}.get(change, change), "unknown"]
        after = ["viewer in film", "admin in every show"] if change == "created" else after

        async def is_noticed():
            return [await answer(key_check, text) for text in (made.plain.text, LATE.text)] == after

        await until(is_noticed, within_s=1.0, what="the change")


async def answer(key_check, text):
    """What a key may do, or why it is refused."""
    try:
        return ", ".join(map(str, (await key_check.check(text)).grants))
    except Unauthenticated as refused:
        return refused.facts["reason"]


async def test_lost_listener_connection_invalidates_cache(counting_db, clock, keys):
    key_check = KeyCheck(counting_db, clock, remember_s=3600)
    made = await keys.create("ci", ADMIN, actor="ann")
    async with watching_changes(key_check):
        await key_check.check(made.plain.text)
        async with keys.database.transaction() as tx:
            # The listener's connection is killed first, so the change is committed without a listener.
            await tx.value(KILL_OTHERS)
            await tx.run(EXPIRE, made.key.id)

        async def is_noticed():
            return await answer(key_check, made.plain.text) == "expired"

        await until(is_noticed, within_s=5.0, what="a refreshed cache")


async def test_lookup_read_before_invalidation_is_not_cached(counting_db, clock, keys):
    key_check = KeyCheck(counting_db, clock, remember_s=3600)
    made = await keys.create("ci", ADMIN, actor="ann")
    counting_db.gate.clear()
    lookup = asyncio.create_task(key_check.check(made.plain.text))
    await until(lambda: counting_db.queries, what="the statement")
    await keys.revoke(made.key.id, actor="ann")
    key_check.invalidate()
    counting_db.gate.set()
    await lookup
    assert await reason(key_check, made.plain.text) == "revoked"


async def test_cached_key_expires_by_postgresql_clock(counting_db, clock, keys):
    key_check = KeyCheck(counting_db, clock, remember_s=3600)
    made = await keys.create("ci", ADMIN, actor="ann", expires_s=60)
    clock.now_ms = lambda: 10**14  # years from now: the local wall clock is not used
    await key_check.check(made.plain.text)
    clock.now_s += 59
    await key_check.check(made.plain.text)
    clock.now_s += 1
    assert await reason(key_check, made.plain.text) == "expired"
    assert len(counting_db.queries) == 1


async def test_postgresql_outage_accepts_only_cached_keys_until_ttl(database_url, clock, keys, proxy):
    parts = urlsplit(database_url)
    pg_proxy = await proxy(parts.hostname, parts.port)
    database = await Database.open(PostgresTarget(url=pg_proxy.url(database_url), connect_timeout_s=1.0))
    try:
        key_check = KeyCheck(database, clock)
        known, fresh = [await keys.create(name, ADMIN, actor="ann") for name in ("known", "fresh")]
        await key_check.check(known.plain.text)
        assert await reason(key_check, UNKNOWN_KEYS[0].text) == "unknown"
        pg_proxy.cut()
        clock.now_s += CACHE_TTL_S - 0.1
        assert (await key_check.check(known.plain.text)).name == "known"
        assert await reason(key_check, UNKNOWN_KEYS[0].text) == "unknown"
        for text in (fresh.plain.text, UNKNOWN_KEYS[1].text):
            with pytest.raises(PostgresUnavailable):
                await key_check.check(text)
        clock.now_s += 0.1
        with pytest.raises(Unavailable) as unavailable:
            await key_check.check(known.plain.text)
        assert known.plain.text.rpartition("_")[2] not in unavailable.value.sentence
        pg_proxy.heal()
        await until(lambda: is_accepted(key_check, known.plain.text), what="PostgreSQL's return")
    finally:
        await database.close()


async def is_accepted(key_check, text):
    try:
        return bool(await key_check.check(text))
    except Unavailable:
        return False


async def test_postgresql_outage_fails_all_waiting_lookups_together(key_check, counting_db):
    async def unavailable(_query, keys):
        counting_db.queries.append(list(keys))
        await counting_db.gate.wait()
        raise PostgresUnavailable("PostgreSQL cannot be reached: check that it runs.")

    counting_db.rows = unavailable
    counting_db.gate.clear()
    pending = [asyncio.create_task(key_check.check(key.text)) for key in UNKNOWN_KEYS[:50]]
    await until(lambda: counting_db.queries, what="the first statement")
    counting_db.gate.set()
    answers = await asyncio.gather(*pending, return_exceptions=True)
    assert {type(answer) for answer in answers} == {PostgresUnavailable}
    assert len(counting_db.queries) <= 2


async def test_last_use_is_written_in_background_at_most_once_a_minute(key_check, clock, keys):
    made = await keys.create("ci", ADMIN, actor="ann")
    unused = await keys.create("unused", ADMIN, actor="ann")
    await key_check.check(made.plain.text)
    assert await keys.database.value(USED, made.key.id) is None
    clock.now_s += 7
    await key_check.uses.flush()
    assert 7 <= await keys.database.value(USED, made.key.id) < 60
    assert await keys.database.value(USED, unused.key.id) is None
    written = await keys.database.value(VERSION, made.key.id)
    await key_check.check(made.plain.text)
    await key_check.uses.flush()
    assert await keys.database.value(VERSION, made.key.id) == written
    await keys.database.run(BACKDATE, made.key.id, 61.0)
    await key_check.check(made.plain.text)
    await key_check.uses.flush()
    assert await keys.database.value(USED, made.key.id) < 60
    assert (await keys.list())[1].last_used_at is not None


async def test_last_use_is_flushed_on_shutdown(key_check, keys):
    made = await keys.create("ci", ADMIN, actor="ann")
    await key_check.check(made.plain.text)
    draining = asyncio.Event()
    draining.set()
    await key_check.uses.run(Lifecycle(draining, lambda: None))
    assert await keys.database.value(USED, made.key.id) is not None


async def test_last_use_write_sends_no_change_notification(key_check, keys):
    made = await keys.create("ci", ADMIN, actor="ann")
    async with watching_changes(key_check), keys.database.listen("rota_keys") as notifications:
        await key_check.check(made.plain.text)
        await key_check.uses.flush()
        await keys.revoke(made.key.id, actor="ann")
        await keys.database.value(NOTIFY_LAST)
        received = [await notifications.next(5.0) for _ in range(2)]
    assert received == ["", "last"]


async def test_failed_last_use_write_is_retried_on_next_flush(key_check, counting_db, keys):
    made = await keys.create("ci", ADMIN, actor="ann")
    await key_check.check(made.plain.text)

    async def unavailable(*_):
        raise PostgresUnavailable("PostgreSQL cannot be reached: check that it runs.")

    counting_db.run = unavailable
    with pytest.raises(PostgresUnavailable):
        await key_check.uses.flush()
    del counting_db.run
    await key_check.uses.flush()
    assert await keys.database.value(USED, made.key.id) is not None


async def test_key_check_logs_no_secret(key_check, keys):
    made = await keys.create("ci", ADMIN, actor="ann")
    with capture_logs() as logged:
        await key_check.check(made.plain.text)
        for text in (made.plain.text[:-1], UNKNOWN_KEYS[0].text, "hunter2"):
            await reason(key_check, text)
    assert "hunter2" not in str(logged)
    assert made.plain.text.rpartition("_")[2][:8] not in str(logged)


async def test_revoked_key_is_refused_by_other_processes_within_a_second(database_url, keys, spawn):
    made = await keys.create("ci", ADMIN, actor="ann")
    others = [await spawn("tests.integration.server.access_checker", env={"URL": database_url}) for _ in range(2)]
    for other in others:
        assert await other.line() == "ready"
        await other.write_line(made.plain.text)
        assert await other.line() == "in ci"
    await keys.revoke(made.key.id, actor="ann")
    for other in others:
        await until(lambda other=other: is_refused_as_revoked(other, made.plain.text), within_s=1.0, what="the refusal")
        other.send(15)
        stderr = await other.errors()
        assert made.plain.text.rpartition("_")[2] not in stderr


async def is_refused_as_revoked(other, text):
    await other.write_line(text)
    return await other.line() == "revoked"
