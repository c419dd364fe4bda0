"""The pool, its errors, cancelled callers, transactions and notifications, on a real server."""

import asyncio
from contextlib import suppress
from urllib.parse import urlsplit

import asyncpg
import msgspec
import pytest

from rota.infra.postgres import Database, PostgresTarget
from rota.infra.postgres import listen as listen_module
from rota.infra.postgres import pool as pool_module
from rota.infra.postgres.sql import parse_query
from rota.model.errors import InvalidSetting, LoginRefused, PostgresUnavailable
from tests.support.waiting import until


def sql(text):
    return parse_query("test", f"-- Test.\n{text}")


ECHO = sql("SELECT $1::int")
SLEEP = sql("SELECT pg_sleep(30)")
pytestmark = pytest.mark.new_connections
PID = sql("SELECT pg_backend_pid()")
KILL_OTHERS = sql(
    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
    " WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name = 'rota'"
)
SESSIONS = sql("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'rota'")
NUMBERS = sql("CREATE TABLE number (n int PRIMARY KEY)")
ADD = sql("INSERT INTO number VALUES ($1)")
COUNT = sql("SELECT count(*) FROM number")


@pytest.fixture
async def opened(database_url):
    """Factory for a database with other limits than the defaults."""
    made = []

    async def start(url=database_url, **limits):
        made.append(await Database.open(PostgresTarget(url=url, **limits)))
        return made[-1]

    yield start
    for database in made:
        await database.close()


def through(proxy_, url):
    parts = urlsplit(url)
    return url.replace(f"{parts.hostname}:{parts.port}", f"{proxy_.host}:{proxy_.port}")


@pytest.fixture
async def far(proxy, database_url):
    """A proxy in front of the test's database, and the URL that leads through it."""
    parts = urlsplit(database_url)
    line = await proxy(parts.hostname, parts.port)
    return line, through(line, database_url)


async def busy(database, query):
    """Whether the server is running `query` for us right now."""
    running = sql(
        "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query = $1 AND datname = current_database()"
    )
    return await database.value(running, query.text)


async def test_every_method_gives_its_shape(database):
    await database.run(NUMBERS)
    await database.run_many(ADD, [(n,) for n in range(3)])
    assert [row["n"] for row in await database.rows(sql("SELECT n FROM number ORDER BY n"))] == [0, 1, 2]
    assert (await database.row(sql("SELECT n FROM number WHERE n = $1"), 2))["n"] == 2
    assert await database.row(sql("SELECT n FROM number WHERE n = $1"), 9) is None
    assert await database.value(COUNT) == 3
    assert await database.run(sql("DELETE FROM number WHERE n > $1"), 0) == 2


async def test_a_session_has_our_limits_and_schema(opened):
    database = await opened(statement_timeout_s=7, lock_timeout_s=3, idle_in_transaction_s=9, application_name="me")
    shown = {
        name: await database.value(sql(f"SHOW {name}"))
        for name in (
            "statement_timeout",
            "lock_timeout",
            "idle_in_transaction_session_timeout",
            "search_path",
            "jit",
            "application_name",
            "timezone",
        )
    }
    assert list(shown.values()) == ["7s", "3s", "9s", "rota, public", "off", "me", "UTC"]


async def test_never_more_connections_than_the_pool_allows_and_everybody_is_served(opened):
    database = await opened(pool_max=3)
    assert sorted(await asyncio.gather(*(database.value(ECHO, n) for n in range(50)))) == list(range(50))
    assert database.pool.size <= 3
    assert await database.value(SESSIONS) <= 3


async def test_who_waits_is_served_in_order_of_arrival(opened):
    database = await opened(pool_max=1)
    served = []

    async def take(n):
        async with database.transaction():
            served.append(n)

    async with database.transaction():
        waiting = []
        for n in range(5):
            waiting.append(asyncio.create_task(take(n)))
            await asyncio.sleep(0)
    await asyncio.gather(*waiting)
    assert served == [0, 1, 2, 3, 4]


async def test_a_caller_who_waits_too_long_is_told_that_the_pool_is_busy(opened):
    database = await opened(pool_max=1, acquire_timeout_s=0.01)
    async with database.transaction():
        with pytest.raises(PostgresUnavailable, match="All 1 connections") as caught:
            await database.value(ECHO, 1)
    assert caught.value.facts["outcome"] == "not_sent"
    assert await database.value(ECHO, 1) == 1


async def test_a_waiter_cancelled_in_the_moment_it_is_served_loses_no_connection(opened):
    database = await opened(pool_max=1, acquire_timeout_s=1)
    connection = await database.pool.acquire()
    waiter = asyncio.create_task(database.pool.acquire())
    await asyncio.sleep(0)
    database.pool.release(connection)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert await database.value(ECHO, 4) == 4


async def test_a_cancelled_statement_ends_on_the_server_and_its_connection_serves_again(opened):
    database, watcher = await opened(pool_max=1), await opened()
    before = await database.value(PID)
    sleeper = asyncio.create_task(database.value(SLEEP))
    await until(lambda: busy(watcher, SLEEP))
    sleeper.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sleeper
    assert await database.value(PID) == before
    assert not await busy(watcher, SLEEP)
    assert database.pool.size == 1


async def test_a_cancelled_transaction_leaves_neither_rows_nor_locks(opened):
    database, watcher = await opened(pool_max=1), await opened()
    await database.run(NUMBERS)

    async def insert_and_sleep():
        async with database.transaction() as tx:
            await tx.run(ADD, 1)
            await tx.value(SLEEP)

    sleeper = asyncio.create_task(insert_and_sleep())
    await until(lambda: busy(watcher, SLEEP))
    sleeper.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sleeper
    assert await database.run(ADD, 1) == 1


async def test_many_callers_cancelled_at_any_moment_leave_the_pool_whole(opened):
    database = await opened(pool_max=3)
    await database.run(NUMBERS)

    async def one(n):
        async with database.transaction() as tx:
            await tx.run(ADD, n)
            await tx.value(ECHO, n)
            raise LookupError

    tasks = [asyncio.create_task(one(n)) for n in range(60)]
    for n, task in enumerate(tasks):
        await asyncio.sleep(0.0003 * (n % 4))
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(await asyncio.gather(*(database.value(ECHO, n) for n in range(9)))) == list(range(9))
    await until(lambda: database.pool.idle == database.pool.size, what="the return of every connection")
    assert database.pool.size <= 3
    assert await database.value(COUNT) == 0


async def test_a_failing_body_rolls_back_and_a_good_one_commits(database):
    await database.run(NUMBERS)

    async def add_and_fail():
        async with database.transaction() as tx:
            await tx.run(ADD, 1)
            raise LookupError

    with pytest.raises(LookupError):
        await add_and_fail()
    async with database.transaction() as tx:
        await tx.run(ADD, 2)
        with pytest.raises(asyncpg.UniqueViolationError):
            async with tx.savepoint():
                await tx.run(ADD, 2)
        assert await tx.value(COUNT) == 1
    assert await database.value(COUNT) == 1


async def test_a_swallowed_error_inside_a_transaction_is_not_taken_for_a_commit(database):
    await database.run(NUMBERS)

    async def add_twice():
        async with database.transaction() as tx:
            await tx.run(ADD, 1)
            with suppress(asyncpg.UniqueViolationError):
                await tx.run(ADD, 1)

    with pytest.raises(AssertionError, match="swallowed"):
        await add_twice()
    assert await database.value(COUNT) == 0


async def test_a_read_only_transaction_cannot_write(database):
    await database.run(NUMBERS)
    with pytest.raises(asyncpg.ReadOnlySQLTransactionError):
        async with database.transaction("repeatable read", readonly=True) as tx:
            await tx.run(ADD, 1)


async def count_and_add_side_by_side(database):
    async with database.transaction("serializable") as one, database.transaction("serializable") as two:
        for n, tx in enumerate((one, two)):
            await tx.value(COUNT)
            await tx.run(ADD, n)


async def test_statement_timeout_lock_timeout_and_serialization_are_told_apart(opened):
    database = await opened(statement_timeout_s=0.05, lock_timeout_s=0.02)
    await database.run(NUMBERS)
    with pytest.raises(asyncpg.QueryCanceledError):
        await database.value(SLEEP)
    async with database.transaction() as tx:
        await tx.run(sql("LOCK TABLE number"))
        with pytest.raises(asyncpg.LockNotAvailableError):
            await database.run(ADD, 1)
    with pytest.raises(asyncpg.SerializationError):
        await count_and_add_side_by_side(database)
    assert await database.value(ECHO, 1) == 1


async def test_a_wrong_argument_is_the_callers_error_and_costs_no_connection(opened):
    database = await opened(pool_max=1)
    before = await database.value(PID)
    with pytest.raises(asyncpg.DataError):
        await database.value(ECHO, "one")
    with pytest.raises(asyncpg.InterfaceError):
        await database.value(ECHO)
    assert await database.value(PID) == before


def changed(url, **parts):
    split = urlsplit(url)
    host = parts.get("host", f"{split.hostname}:{split.port}")
    login = parts.get("login", f"{split.username}:{split.password}")
    return f"{split.scheme}://{login}@{host}{parts.get('path', split.path)}"


async def refusal(url):
    with pytest.raises((LoginRefused, PostgresUnavailable, InvalidSetting)) as caught:
        await Database.open(PostgresTarget(url=url, connect_timeout_s=1))
    assert caught.value.__cause__ is None
    return caught.value


async def test_a_wrong_password_or_database_is_a_refused_login_and_shows_no_password(database_url):
    address = urlsplit(database_url).netloc.rpartition("@")[2]
    for url, words in (
        (changed(database_url, login="postgres:hush-hush"), "refused the login"),
        (changed(database_url, login="nobody:hush-hush"), "refused the login"),
        (changed(database_url, path="/no_such_database"), "has no such database"),
    ):
        error = await refusal(url)
        assert isinstance(error, LoginRefused)
        assert words in error.sentence
        assert address in error.sentence
        assert "hush-hush" not in f"{error.sentence} {error.facts}"


async def test_an_unreachable_server_is_unavailable_and_named_by_address(database_url, unused_tcp_port):
    error = await refusal(changed(database_url, login="me:hush-hush", host=f"127.0.0.1:{unused_tcp_port}"))
    assert isinstance(error, PostgresUnavailable)
    assert f"127.0.0.1:{unused_tcp_port}" in error.sentence
    assert "connection refused" in error.sentence
    assert "hush-hush" not in f"{error.sentence} {error.facts}"
    assert error.facts["outcome"] == "not_sent"


async def test_a_url_nobody_can_read_is_an_invalid_setting_and_not_repeated():
    for url in (
        "postgresql://me:hush-hush@host:port/db",
        "mysql://me:hush-hush@host/db",
        "postgresql://localhost:12/hush-hush@db.example:5432/x",
        "hush-hush",
    ):
        error = await refusal(url)
        assert isinstance(error, InvalidSetting), url
        assert "hush-hush" not in error.sentence


def test_a_target_never_shows_its_password():
    target = PostgresTarget(url="postgresql://me:hush-hush@db.example:5432/rota?sslmode=require")
    assert repr(target) == "PostgresTarget(db.example:5432/rota, pool_max=10)"
    assert PostgresTarget(url="postgresql:///rota?host=/run/pg").address == "/run/pg/rota"


async def test_terminated_backends_are_replaced_and_what_they_were_doing_is_of_unknown_outcome(opened):
    database, killer = await opened(pool_max=2), await opened()
    sleeper = asyncio.create_task(database.value(SLEEP))
    await until(lambda: busy(killer, SLEEP))
    await killer.value(KILL_OTHERS)
    with pytest.raises(PostgresUnavailable, match="may or may not") as caught:
        await sleeper
    assert caught.value.facts["outcome"] == "unknown"
    assert await database.value(ECHO, 5) == 5


async def test_a_transaction_whose_backend_dies_took_no_effect_and_says_so(opened):
    database, killer = await opened(pool_max=1), await opened()
    await database.run(NUMBERS)

    async def add_while_killed():
        async with database.transaction() as tx:
            await tx.run(ADD, 1)
            await killer.value(KILL_OTHERS)
            await tx.run(ADD, 2)

    with pytest.raises(PostgresUnavailable, match="nothing took effect") as caught:
        await add_while_killed()
    assert caught.value.facts["outcome"] == "rolled_back"
    assert await database.value(COUNT) == 0


async def test_a_lost_reply_to_commit_is_an_unknown_outcome_and_is_not_repeated(opened, far, database):
    line, url = far
    distant = await opened(url)
    await database.run(NUMBERS)

    async def add_and_lose_the_reply():
        async with distant.transaction() as tx:
            await tx.run(ADD, 1)
            line.drop_replies()

    async def cut_the_line_once_it_is_committed():
        await until(lambda: database.value(COUNT))
        line.reset()

    with pytest.raises(PostgresUnavailable, match="COMMIT") as caught:
        await asyncio.gather(add_and_lose_the_reply(), cut_the_line_once_it_is_committed())
    assert caught.value.facts["outcome"] == "unknown"
    assert await database.value(COUNT) == 1


async def test_a_server_that_stops_answering_is_given_up_after_the_clients_own_limit(opened, far, monkeypatch):
    monkeypatch.setattr("rota.infra.postgres.target.ANSWER_GRACE_S", 0.05)
    monkeypatch.setattr("rota.infra.postgres.pool.RESET_TIMEOUT_S", 0.05)
    line, url = far
    distant = await opened(url, pool_max=1, statement_timeout_s=0.05)
    line.half_open()
    with pytest.raises(PostgresUnavailable, match="no answer in time"):
        await distant.value(ECHO, 1)
    line.heal()
    line.reset()
    assert await distant.value(ECHO, 1) == 1


async def test_an_opening_that_fails_half_way_leaves_no_connection(database_url, database, monkeypatch):
    connect, alone = pool_module.connect, await database.value(SESSIONS)
    made = []

    async def second_fails(target):
        if made:
            raise PostgresUnavailable("no more")
        made.append(await connect(target))
        return made[0]

    monkeypatch.setattr(pool_module, "connect", second_fails)
    with pytest.raises(PostgresUnavailable, match="no more"):
        await Database.open(PostgresTarget(url=database_url, pool_min=2))
    assert made[0].is_closed()
    await until(lambda: equal(database.value(SESSIONS), alone))


async def equal(value, expected):
    return await value == expected


async def test_an_urgent_statement_does_not_wait_for_the_pool(opened):
    database = await opened(pool_max=1, acquire_timeout_s=0.01)
    async with database.transaction():
        assert [row[0] for row in await database.rows(ECHO, 7, urgent=True)] == [7]
        with pytest.raises(PostgresUnavailable, match="All 1 connections"):
            await database.rows(ECHO, 7)


async def test_a_closed_database_refuses_and_may_be_closed_again(opened):
    database = await opened()
    await database.close()
    with pytest.raises(PostgresUnavailable, match="stopping"):
        await database.value(ECHO, 1)
    await database.close()


async def test_closing_waits_for_what_is_under_way_and_sends_waiters_home(opened):
    database = await opened(pool_max=1)
    transaction = database.transaction()
    tx = await transaction.__aenter__()
    waiter = asyncio.create_task(database.value(ECHO, 1))
    await asyncio.sleep(0)
    closing = asyncio.create_task(database.close())
    with pytest.raises(PostgresUnavailable):
        await waiter
    assert await tx.value(ECHO, 2) == 2
    assert not closing.done()
    await transaction.__aexit__(None, None, None)
    await closing


async def test_notifications_arrive_and_channels_are_kept_apart(database):
    notify = sql("SELECT pg_notify($1, $2)")
    async with database.listen("one") as ones, database.listen("two") as twos, database.listen("one") as also_ones:
        await database.run(notify, "one", "a")
        await database.run(notify, "two", "b")
        assert [await ones.next(5), await also_ones.next(5), await twos.next(5)] == ["a", "a", "b"]
        assert await ones.next(0.001) is None


async def test_a_listener_survives_its_backend_and_is_told_that_it_may_have_missed_some(database):
    async with database.listen("one") as ones:
        await database.value(KILL_OTHERS)
        await database.run(sql("SELECT pg_notify('one', 'lost')"))
        async with asyncio.timeout(5):
            assert await anext(ones) is None
        await database.run(sql("SELECT pg_notify('one', 'after')"))
        assert await ones.next(5) == "after"


async def test_a_listener_whose_line_died_silently_notices_by_its_heartbeat(opened, far, monkeypatch):
    monkeypatch.setattr(listen_module, "HEARTBEAT_INTERVAL_S", 0.02)
    monkeypatch.setattr("rota.infra.postgres.target.ANSWER_GRACE_S", 0.05)
    line, url = far
    distant = await opened(url, statement_timeout_s=0.05, connect_timeout_s=0.5)
    async with distant.listen("one") as ones:
        line.half_open()
        await until(lambda: not distant._listener._listening.is_set(), what="the heartbeat's failure")
        line.heal()
        line.reset()
        async with asyncio.timeout(5):
            assert await anext(ones) is None


async def test_a_slow_consumer_loses_notifications_but_learns_that_it_did(database, monkeypatch):
    monkeypatch.setattr(listen_module, "QUEUE_MAX", 3)
    async with database.listen("one") as ones, database.listen("done") as done:
        for n in range(10):
            await database.run(sql("SELECT pg_notify('one', $1)"), str(n))
        await database.run(sql("SELECT pg_notify('done', '')"))
        assert await done.next(5) == ""
        seen = [await ones.next(0.001) for _ in range(3)]
    assert None in seen


async def test_the_listening_connection_opens_with_the_first_listener_and_ends_with_the_database(opened, database):
    other = await opened()
    alone = await database.value(SESSIONS)
    for _ in range(3):
        async with other.listen("one"):
            assert await database.value(SESSIONS) == alone + 1
    await other.close()
    await until(lambda: fewer(database, alone))


async def fewer(database, alone):
    return await database.value(SESSIONS) < alone


async def test_who_begins_to_listen_while_the_database_is_closed_is_refused_and_leaves_nothing(opened, monkeypatch):
    database = await opened()
    connect = listen_module.connect
    connecting, closed = asyncio.Event(), asyncio.Event()

    async def connect_late(target):
        connecting.set()
        await closed.wait()
        return await connect(target)

    async def listen():
        async with database.listen("one"):
            await asyncio.Event().wait()

    monkeypatch.setattr(listen_module, "connect", connect_late)
    listening = asyncio.create_task(listen())
    await connecting.wait()
    await database.close()
    closed.set()
    for late in (listening, listen()):
        with pytest.raises(PostgresUnavailable, match="stopping"):
            async with asyncio.timeout(2):
                await late


def test_target_limits_are_checked():
    with pytest.raises(AssertionError):
        PostgresTarget(url="postgresql://x", pool_min=3, pool_max=2)
    with pytest.raises(AssertionError):
        msgspec.structs.replace(PostgresTarget(url="postgresql://x", pool_min=0), pool_max=0).__post_init__()
