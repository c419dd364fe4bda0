"""Who stands behind a key: let in, refused, remembered and forgotten, also while PostgreSQL is away."""

import asyncio
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
from structlog.testing import capture_logs

from rota.accounting.admin import QuotaAdmin
from rota.infra.postgres import Database, PostgresTarget
from rota.infra.service import Lifecycle
from rota.model.access import GrantSpec, Role
from rota.model.api_key_format import ALPHABET, ENTROPY_BYTES, new_key
from rota.model.errors import PostgresUnavailable, Unauthenticated, Unavailable
from rota.server.access import ApiKeyStore, KeyCheck
from rota.server.access.check import CACHE_TTL_S, UNKNOWN_CACHE_MAX
from tests.contract.ledger_suite import sql
from tests.support.placement import Moved
from tests.support.waiting import until

EXPIRE = sql("UPDATE rota.api_key SET ts_expires = now() - interval '1 second' WHERE id = $1")
FORGED = sql("UPDATE rota.api_key SET digest = $2 WHERE id = $1")
USED = sql("SELECT extract(epoch FROM now() - ts_last_used)::float8 FROM rota.api_key WHERE id = $1")
BACKDATE = sql("UPDATE rota.api_key SET ts_last_used = now() - make_interval(secs => $2) WHERE id = $1")
KILL_OTHERS = sql(
    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
    " WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name = 'rota'"
)
LAST_NEWS = sql("SELECT pg_notify('rota_keys', 'last')")
VERSION = sql("SELECT xmin::text FROM rota.api_key WHERE id = $1")
ADMIN = [GrantSpec(Role.ADMIN)]
STRANGERS = [
    new_key(number.to_bytes(7, "big") + number.to_bytes(20, "big")) for number in range(UNKNOWN_CACHE_MAX + 100)
]


class Counted:
    """A database that counts what is asked of it."""

    def __init__(self, database):
        self._database = database
        self.asked = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def rows(self, query, keys):
        self.asked.append(list(keys))
        found = await self._database.rows(query, keys)
        await self.gate.wait()
        return found

    def __getattr__(self, name):
        return getattr(self._database, name)


@pytest.fixture
def keys(database):
    return ApiKeyStore(database)


@pytest.fixture
def counted(database):
    return Counted(database)


@pytest.fixture
def clock():
    return Moved()


@pytest.fixture
def checking(counted, clock):
    return KeyCheck(counted, clock)


async def reason(checking, text):
    with pytest.raises(Unauthenticated) as refused:
        await checking.check(text)
    assert refused.value.sentence.count("\n") == 0
    if len(parts := text.split("_")) == 3:
        assert parts[2] not in refused.value.sentence
    return refused.value.facts["reason"]


@asynccontextmanager
async def watched(checking):
    draining, ready = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(checking.watch_changes(Lifecycle(draining, ready.set)))
        await ready.wait()
        yield
        draining.set()


async def test_a_good_key_is_looked_up_once_in_its_time(checking, counted, clock, keys):
    made = await keys.create("ci", ADMIN, actor="ann")
    assert [(await checking.check(made.plain.text)).name for _ in range(3)] == ["ci"] * 3
    assert counted.asked == [[made.key.id]]
    clock.now_s += CACHE_TTL_S
    await checking.check(made.plain.text)
    assert len(counted.asked) == 2


async def test_refusals_are_told_apart_only_to_who_has_the_secret(checking, keys):
    made = [await keys.create(name, ADMIN, actor="ann") for name in ("good", "old", "gone")]
    good, old, gone = (each.plain for each in made)
    await keys.database.run(EXPIRE, old.id)
    await keys.revoke(gone.id, actor="ann")
    assert await reason(checking, "hunter2") == "malformed"
    assert await reason(checking, good.text[:-1] + ALPHABET[0 if good.text[-1] != ALPHABET[0] else 1]) == "mistyped"
    assert await reason(checking, STRANGERS[0].text) == "unknown"
    assert (await reason(checking, old.text), await reason(checking, gone.text)) == ("expired", "revoked")
    for plain in (good, old, gone):
        # The same id with another secret: as if all of it were unknown.
        await keys.database.run(FORGED, plain.id, STRANGERS[0].digest)
        checking.invalidate()
        assert await reason(checking, plain.text) == "unknown"


async def test_unknown_keys_are_remembered_too_and_do_not_push_out_good_ones(checking, counted, keys):
    made = await keys.create("ci", ADMIN, actor="ann")
    await checking.check(made.plain.text)
    for _ in range(3):
        assert await reason(checking, STRANGERS[0].text) == "unknown"
    assert len(counted.asked) == 2
    for start in range(0, len(STRANGERS), 1000):
        await asyncio.gather(*(reason(checking, key.text) for key in STRANGERS[start : start + 1000]))
    asked = len(counted.asked)
    await checking.check(made.plain.text)
    assert len(counted.asked) == asked


async def test_many_who_guess_at_once_share_a_few_statements_one_at_a_time(checking, counted):
    counted.gate.clear()
    guessing = [asyncio.create_task(reason(checking, key.text)) for key in STRANGERS[:1000]]
    await until(lambda: counted.asked, what="the first statement")
    assert len(counted.asked) == 1
    counted.gate.set()
    assert set(await asyncio.gather(*guessing)) == {"unknown"}
    assert len(counted.asked) <= 4


async def test_who_leaves_in_the_middle_leaves_the_others_their_answer(checking, counted, keys):
    made = await keys.create("ci", ADMIN, actor="ann")
    counted.gate.clear()
    first, second = (asyncio.create_task(checking.check(made.plain.text)) for _ in range(2))
    await until(lambda: counted.asked, what="the first statement")
    first.cancel()
    counted.gate.set()
    assert (await second).name == "ci"
    assert first.cancelled()


LATE = new_key(bytes(range(ENTROPY_BYTES)))
CHANGES = {
    "revoked": lambda keys, key: keys.revoke(key.id, actor="ann"),
    "expired": lambda keys, key: keys.database.run(EXPIRE, key.id),
    "renamed": lambda keys, _key: QuotaAdmin(keys.database).rename_show("film", "feature", actor="ann"),
    "deleted": lambda keys, _key: QuotaAdmin(keys.database).delete_show("film", actor="ann"),
    "made": lambda keys, _key: keys.add(LATE, "late", ADMIN, actor="ann"),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_change_is_heard_of_at_once_however_long_is_remembered(counted, clock, keys, change):
    await QuotaAdmin(keys.database).create_show("film", actor="ann")
    checking = KeyCheck(counted, clock, remember_s=3600)
    made = await keys.create("ci", [GrantSpec(Role.VIEWER, "film")], actor="ann")
    async with watched(checking):
        before = [await answer(checking, text) for text in (made.plain.text, LATE.text)]
        assert before == ["viewer in film", "unknown"]
        await CHANGES[change](keys, made.key)
        after = [{"renamed": "viewer in feature", "deleted": ""}.get(change, change), "unknown"]
        after = ["viewer in film", "admin in every show"] if change == "made" else after

        async def is_noticed():
            return [await answer(checking, text) for text in (made.plain.text, LATE.text)] == after

        await until(is_noticed, within_s=1.0, what="the news")


async def answer(checking, text):
    """What a key may do, or why it is refused."""
    try:
        return ", ".join(map(str, (await checking.check(text)).grants))
    except Unauthenticated as refused:
        return refused.facts["reason"]


async def test_a_change_that_may_have_been_missed_counts_as_one(counted, clock, keys):
    checking = KeyCheck(counted, clock, remember_s=3600)
    made = await keys.create("ci", ADMIN, actor="ann")
    async with watched(checking):
        await checking.check(made.plain.text)
        async with keys.database.transaction() as tx:
            # The listener is gone before anything is told, and the change is committed while nobody listens.
            await tx.value(KILL_OTHERS)
            await tx.run(EXPIRE, made.key.id)

        async def is_noticed():
            return await answer(checking, made.plain.text) == "expired"

        await until(is_noticed, within_s=5.0, what="a new look")


async def test_what_was_read_before_a_change_is_not_remembered_after_it(counted, clock, keys):
    checking = KeyCheck(counted, clock, remember_s=3600)
    made = await keys.create("ci", ADMIN, actor="ann")
    counted.gate.clear()
    asked = asyncio.create_task(checking.check(made.plain.text))
    await until(lambda: counted.asked, what="the statement")
    await keys.revoke(made.key.id, actor="ann")
    checking.invalidate()
    counted.gate.set()
    await asked
    assert await reason(checking, made.plain.text) == "revoked"


async def test_a_key_expires_on_the_clock_of_postgresql_also_while_it_is_remembered(counted, clock, keys):
    checking = KeyCheck(counted, clock, remember_s=3600)
    made = await keys.create("ci", ADMIN, actor="ann", expires_s=60)
    clock.now_ms = lambda: 10**14  # years from now: nobody asks this machine what time it is
    await checking.check(made.plain.text)
    clock.now_s += 59
    await checking.check(made.plain.text)
    clock.now_s += 1
    assert await reason(checking, made.plain.text) == "expired"
    assert len(counted.asked) == 1


async def test_without_postgresql_who_was_checked_lately_stays_and_nobody_else_comes_in(
    database_url, clock, keys, proxy
):
    parts = urlsplit(database_url)
    far = await proxy(parts.hostname, parts.port)
    database = await Database.open(PostgresTarget(url=far.url(database_url), connect_timeout_s=1.0))
    try:
        checking = KeyCheck(database, clock)
        known, fresh = [await keys.create(name, ADMIN, actor="ann") for name in ("known", "fresh")]
        await checking.check(known.plain.text)
        assert await reason(checking, STRANGERS[0].text) == "unknown"
        far.cut()
        clock.now_s += CACHE_TTL_S - 0.1
        assert (await checking.check(known.plain.text)).name == "known"
        assert await reason(checking, STRANGERS[0].text) == "unknown"
        for text in (fresh.plain.text, STRANGERS[1].text):
            with pytest.raises(PostgresUnavailable):
                await checking.check(text)
        clock.now_s += 0.1
        with pytest.raises(Unavailable) as away:
            await checking.check(known.plain.text)
        assert known.plain.text.rpartition("_")[2] not in away.value.sentence
        far.heal()
        await until(lambda: opens(checking, known.plain.text), what="PostgreSQL's return")
    finally:
        await database.close()


async def opens(checking, text):
    try:
        return bool(await checking.check(text))
    except Unavailable:
        return False


async def test_all_who_wait_are_refused_together_when_postgresql_does_not_answer(checking, counted):
    async def away(_query, keys):
        counted.asked.append(list(keys))
        await counted.gate.wait()
        raise PostgresUnavailable("PostgreSQL cannot be reached: check that it runs.")

    counted.rows = away
    counted.gate.clear()
    asking = [asyncio.create_task(checking.check(key.text)) for key in STRANGERS[:50]]
    await until(lambda: counted.asked, what="the first statement")
    counted.gate.set()
    answers = await asyncio.gather(*asking, return_exceptions=True)
    assert {type(answer) for answer in answers} == {PostgresUnavailable}
    assert len(counted.asked) <= 2


async def test_uses_are_written_beside_the_request_and_once_a_minute(checking, clock, keys):
    made = await keys.create("ci", ADMIN, actor="ann")
    unused = await keys.create("unused", ADMIN, actor="ann")
    await checking.check(made.plain.text)
    assert await keys.database.value(USED, made.key.id) is None
    clock.now_s += 7
    await checking.uses.flush()
    assert 7 <= await keys.database.value(USED, made.key.id) < 60
    assert await keys.database.value(USED, unused.key.id) is None
    written = await keys.database.value(VERSION, made.key.id)
    await checking.check(made.plain.text)
    await checking.uses.flush()
    assert await keys.database.value(VERSION, made.key.id) == written
    await keys.database.run(BACKDATE, made.key.id, 61.0)
    await checking.check(made.plain.text)
    await checking.uses.flush()
    assert await keys.database.value(USED, made.key.id) < 60
    assert (await keys.list())[1].last_used_at is not None


async def test_uses_are_written_before_the_process_ends(checking, keys):
    made = await keys.create("ci", ADMIN, actor="ann")
    await checking.check(made.plain.text)
    draining = asyncio.Event()
    draining.set()
    await checking.uses.run(Lifecycle(draining, lambda: None))
    assert await keys.database.value(USED, made.key.id) is not None


async def test_a_last_use_is_no_news(checking, keys):
    made = await keys.create("ci", ADMIN, actor="ann")
    async with watched(checking), keys.database.listen("rota_keys") as told:
        await checking.check(made.plain.text)
        await checking.uses.flush()
        await keys.revoke(made.key.id, actor="ann")
        await keys.database.value(LAST_NEWS)
        heard = [await told.next(5.0) for _ in range(2)]
    assert heard == ["", "last"]


async def test_uses_that_could_not_be_written_are_kept_for_the_next_time(checking, counted, keys):
    made = await keys.create("ci", ADMIN, actor="ann")
    await checking.check(made.plain.text)

    async def away(*_):
        raise PostgresUnavailable("PostgreSQL cannot be reached: check that it runs.")

    counted.run = away
    with pytest.raises(PostgresUnavailable):
        await checking.uses.flush()
    del counted.run
    await checking.uses.flush()
    assert await keys.database.value(USED, made.key.id) is not None


async def test_no_secret_is_logged(checking, keys):
    made = await keys.create("ci", ADMIN, actor="ann")
    with capture_logs() as logged:
        await checking.check(made.plain.text)
        for text in (made.plain.text[:-1], STRANGERS[0].text, "hunter2"):
            await reason(checking, text)
    assert "hunter2" not in str(logged)
    assert made.plain.text.rpartition("_")[2][:8] not in str(logged)


async def test_two_processes_refuse_a_revoked_key_within_a_second(database_url, keys, spawn):
    made = await keys.create("ci", ADMIN, actor="ann")
    others = [await spawn("tests.integration.server.access_checker", env={"URL": database_url}) for _ in range(2)]
    for other in others:
        assert await other.line() == "ready"
        await other.say(made.plain.text)
        assert await other.line() == "in ci"
    await keys.revoke(made.key.id, actor="ann")
    for other in others:
        await until(lambda other=other: told_revoked(other, made.plain.text), within_s=1.0, what="the refusal")
        other.send(15)
        said = await other.errors()
        assert made.plain.text.rpartition("_")[2] not in said


async def told_revoked(other, text):
    await other.say(text)
    return await other.line() == "revoked"
