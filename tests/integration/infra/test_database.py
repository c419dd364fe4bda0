"""The connection pool, its errors, cancellation, transactions and notifications, on a real server."""

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
from rota.infra.postgres.target import LOST_CLIENT_CHECK_S
from rota.model.errors import InvalidSetting, LoginRefused, PostgresBusy, PostgresUnavailable
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
    """Factory for databases with non-default limits."""
    made = []

    async def start(url=database_url, **limits):
        made.append(await Database.open(PostgresTarget(url=url, **limits)))
        return made[-1]

    yield start
    for database in made:
        await database.close()


def url_through(proxy_, url):
    parts = urlsplit(url)
    return url.replace(f"{parts.hostname}:{parts.port}", f"{proxy_.host}:{proxy_.port}")


@pytest.fixture
async def proxied(proxy, database_url):
    """A proxy in front of the test's database, and the database URL through it."""
    parts = urlsplit(database_url)
    network = await proxy(parts.hostname, parts.port)
    return network, url_through(network, database_url)


async def is_running(database, query):
    """Whether the server is executing `query` right now."""
    running = sql(
        "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query = $1 AND datname = current_database()"
    )
    return await database.value(running, query.text)


async def test_database_methods_return_their_documented_types(database):
    await database.run(NUMBERS)
    for n in range(3):
        assert await database.run(ADD, n) == 1
    assert [row["n"] for row in await database.rows(sql("SELECT n FROM number ORDER BY n"))] == [0, 1, 2]
    assert (await database.row(sql("SELECT n FROM number WHERE n = $1"), 2))["n"] == 2
    assert await database.row(sql("SELECT n FROM number WHERE n = $1"), 9) is None
    assert await database.value(COUNT) == 3
    assert await database.run(sql("DELETE FROM number WHERE n > $1"), 0) == 2


@pytest.mark.parametrize(("given_s", "limit"), [(None, "3s"), (1, "1s"), (20, "20s"), (90, "1min")])
async def test_idle_limit_of_a_transaction_is_three_seconds_unless_it_sets_its_own(database, given_s, limit):
    async with database.transaction(idle_s=given_s) as tx:
        assert await tx.value(sql("SHOW idle_in_transaction_session_timeout")) == limit


async def test_session_uses_the_configured_limits_and_schema(opened):
    database = await opened(statement_timeout_s=7, lock_timeout_s=3, idle_in_transaction_s=2, application_name="me")
    shown = {
        name: await database.value(sql(f"SHOW {name}"))
        for name in (
            "statement_timeout",
            "lock_timeout",
            "idle_in_transaction_session_timeout",
            "client_connection_check_interval",
            "search_path",
            "jit",
            "application_name",
            "timezone",
        )
    }
    assert list(shown.values()) == ["7s", "3s", "2s", "2s", "rota, public", "off", "me", "UTC"]


async def test_pool_never_exceeds_its_maximum_and_serves_all_callers(opened):
    database = await opened(pool_max=3)
    assert sorted(await asyncio.gather(*(database.value(ECHO, n) for n in range(50)))) == list(range(50))
    assert database.pool.size <= 3
    assert await database.value(SESSIONS) <= 3


async def test_pool_waiters_are_served_in_arrival_order(opened):
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


async def test_caller_waiting_too_long_for_a_connection_gets_pool_exhausted_error(opened):
    database = await opened(pool_max=1, acquire_timeout_s=0.01)
    async with database.transaction():
        with pytest.raises(PostgresUnavailable, match="All 1 connections") as caught:
            await database.value(ECHO, 1)
    assert caught.value.facts["outcome"] == "not_sent"
    assert await database.value(ECHO, 1) == 1


async def test_waiter_cancelled_while_being_served_does_not_leak_a_connection(opened):
    database = await opened(pool_max=1, acquire_timeout_s=1)
    connection = await database.pool.acquire()
    waiter = asyncio.create_task(database.pool.acquire())
    await asyncio.sleep(0)
    database.pool.release(connection)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert await database.value(ECHO, 4) == 4


async def test_cancelled_statement_ends_on_the_server_and_its_connection_is_reused(opened):
    database, watcher = await opened(pool_max=1), await opened()
    before = await database.value(PID)
    sleeper = asyncio.create_task(database.value(SLEEP))
    await until(lambda: is_running(watcher, SLEEP))
    sleeper.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sleeper
    assert await database.value(PID) == before
    assert not await is_running(watcher, SLEEP)
    assert database.pool.size == 1


async def test_cancelled_transaction_leaves_neither_rows_nor_locks(opened):
    database, watcher = await opened(pool_max=1), await opened()
    await database.run(NUMBERS)

    async def insert_and_sleep():
        async with database.transaction() as tx:
            await tx.run(ADD, 1)
            await tx.value(SLEEP)

    sleeper = asyncio.create_task(insert_and_sleep())
    await until(lambda: is_running(watcher, SLEEP))
    sleeper.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sleeper
    assert await database.run(ADD, 1) == 1


async def test_statement_of_a_client_that_has_gone_ends_within_seconds(opened):
    database, watcher = await opened(pool_max=1), await opened()
    connection = await database.pool.acquire()
    sleeper = asyncio.create_task(connection.execute(SLEEP.text))
    await until(lambda: is_running(watcher, SLEEP))
    connection.terminate()
    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, OSError)):
        await sleeper
    database.pool.release_dirty(connection)

    async def has_ended():
        return not await is_running(watcher, SLEEP)

    await until(has_ended, within_s=2 * LOST_CLIENT_CHECK_S + 2)


async def test_callers_cancelled_at_random_moments_do_not_damage_the_pool(opened):
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
    await until(lambda: database.pool.idle == database.pool.size, what="every connection to be idle")
    assert database.pool.size <= 3
    assert await database.value(COUNT) == 0


async def test_transaction_rolls_back_on_error_and_commits_otherwise(database):
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


async def test_error_suppressed_inside_a_transaction_does_not_commit(database):
    await database.run(NUMBERS)

    async def add_twice():
        async with database.transaction() as tx:
            await tx.run(ADD, 1)
            with suppress(asyncpg.UniqueViolationError):
                await tx.run(ADD, 1)

    with pytest.raises(AssertionError, match="swallowed"):
        await add_twice()
    assert await database.value(COUNT) == 0


async def test_read_only_transaction_cannot_write(database):
    await database.run(NUMBERS)
    with pytest.raises(asyncpg.ReadOnlySQLTransactionError):
        async with database.transaction("repeatable read", readonly=True) as tx:
            await tx.run(ADD, 1)


async def count_and_add_side_by_side(database):
    async with database.transaction("serializable") as one, database.transaction("serializable") as two:
        for n, tx in enumerate((one, two)):
            await tx.value(COUNT)
            await tx.run(ADD, n)


async def test_statement_timeout_lock_timeout_and_serialization_failure_are_busy_and_keep_the_connection(opened):
    database = await opened(statement_timeout_s=0.05, lock_timeout_s=0.02)
    await database.run(NUMBERS)
    pid = await database.value(PID)
    with pytest.raises(PostgresBusy, match="statement timeout") as busy:
        await database.value(SLEEP)
    assert (busy.value.facts["outcome"], busy.value.facts["sqlstate"]) == ("rolled_back", "57014")
    assert await database.value(PID) == pid
    async with database.transaction() as tx:
        await tx.run(sql("LOCK TABLE number"))
        with pytest.raises(PostgresBusy, match="lock timeout"):
            await database.run(ADD, 1)
    with pytest.raises(PostgresBusy, match="could not serialize"):
        await count_and_add_side_by_side(database)
    assert await database.value(ECHO, 1) == 1


@pytest.mark.parametrize("in_transaction", [False, True])
async def test_connection_to_a_primary_that_became_a_standby_is_replaced(opened, in_transaction):
    database = await opened(pool_max=1)
    await database.run(NUMBERS)
    before = await database.value(PID)
    await database.run(sql("SET default_transaction_read_only = on"))

    async def add():
        if in_transaction:
            async with database.transaction() as tx:
                await tx.run(sql("SET TRANSACTION READ ONLY"))
                await tx.run(ADD, 1)
        else:
            await database.run(ADD, 1)

    with pytest.raises(PostgresUnavailable, match="is read-only") as error:
        await add()
    assert error.value.facts["outcome"] == "rolled_back"
    assert await database.value(PID) != before
    assert await database.run(ADD, 1) == 1


async def test_invalid_argument_raises_and_keeps_the_connection(opened):
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


async def test_wrong_password_or_database_raises_login_refused_without_the_password(database_url):
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


async def test_unreachable_server_raises_unavailable_with_its_address(database_url, unused_tcp_port):
    error = await refusal(changed(database_url, login="me:hush-hush", host=f"127.0.0.1:{unused_tcp_port}"))
    assert isinstance(error, PostgresUnavailable)
    assert f"127.0.0.1:{unused_tcp_port}" in error.sentence
    assert "connection refused" in error.sentence
    assert "hush-hush" not in f"{error.sentence} {error.facts}"
    assert error.facts["outcome"] == "not_sent"


async def test_invalid_url_raises_invalid_setting_without_quoting_it():
    for url in (
        "postgresql://me:hush-hush@host:port/db",
        "mysql://me:hush-hush@host/db",
        "postgresql://localhost:12/hush-hush@db.example:5432/x",
        "hush-hush",
    ):
        error = await refusal(url)
        assert isinstance(error, InvalidSetting), url
        assert "hush-hush" not in error.sentence


def test_postgres_target_repr_hides_the_password():
    target = PostgresTarget(url="postgresql://me:hush-hush@db.example:5432/rota?sslmode=require")
    assert repr(target) == "PostgresTarget(db.example:5432/rota, pool_max=10)"
    assert PostgresTarget(url="postgresql:///rota?host=/run/pg").address == "/run/pg/rota"


async def test_terminated_backend_is_replaced_and_its_statement_has_unknown_outcome(opened):
    database, killer = await opened(pool_max=2), await opened()
    sleeper = asyncio.create_task(database.value(SLEEP))
    await until(lambda: is_running(killer, SLEEP))
    await killer.value(KILL_OTHERS)
    with pytest.raises(PostgresUnavailable, match="may or may not") as caught:
        await sleeper
    assert caught.value.facts["outcome"] == "unknown"
    assert await database.value(ECHO, 5) == 5


async def test_transaction_of_a_terminated_backend_is_reported_as_rolled_back(opened):
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


async def test_lost_commit_reply_has_unknown_outcome_and_is_not_retried(opened, proxied, database):
    network, url = proxied
    remote = await opened(url)
    await database.run(NUMBERS)

    async def add_and_lose_the_reply():
        async with remote.transaction() as tx:
            await tx.run(ADD, 1)
            network.drop_replies()

    async def reset_after_commit():
        await until(lambda: database.value(COUNT))
        network.reset()

    with pytest.raises(PostgresUnavailable, match="COMMIT") as caught:
        await asyncio.gather(add_and_lose_the_reply(), reset_after_commit())
    assert caught.value.facts["outcome"] == "unknown"
    assert await database.value(COUNT) == 1


async def test_unresponsive_server_is_abandoned_after_the_client_timeout(opened, proxied, monkeypatch):
    monkeypatch.setattr("rota.infra.postgres.target.ANSWER_GRACE_S", 0.05)
    monkeypatch.setattr("rota.infra.postgres.pool.RESET_TIMEOUT_S", 0.05)
    network, url = proxied
    remote = await opened(url, pool_max=1, statement_timeout_s=0.05)
    network.half_open()
    with pytest.raises(PostgresUnavailable, match="no answer in time"):
        await remote.value(ECHO, 1)
    network.heal()
    network.reset()
    assert await remote.value(ECHO, 1) == 1


async def test_database_open_that_fails_midway_closes_its_connections(database_url, database, monkeypatch):
    connect, baseline = pool_module.connect, await database.value(SESSIONS)
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
    await until(lambda: equal(database.value(SESSIONS), baseline))


async def equal(value, expected):
    return await value == expected


async def test_urgent_statement_bypasses_the_exhausted_pool(opened):
    database = await opened(pool_max=1, acquire_timeout_s=0.01)
    async with database.transaction():
        assert [row[0] for row in await database.rows(ECHO, 7, urgent=True)] == [7]
        with pytest.raises(PostgresUnavailable, match="All 1 connections"):
            await database.rows(ECHO, 7)


async def test_closed_database_refuses_statements_and_can_be_closed_again(opened):
    database = await opened()
    await database.close()
    with pytest.raises(PostgresUnavailable, match="stopping"):
        await database.value(ECHO, 1)
    await database.close()


async def test_close_waits_for_open_transactions_and_fails_waiting_callers(opened):
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


async def test_notifications_are_delivered_per_channel(database):
    notify = sql("SELECT pg_notify($1, $2)")
    async with database.listen("one") as ones, database.listen("two") as twos, database.listen("one") as also_ones:
        await database.run(notify, "one", "a")
        await database.run(notify, "two", "b")
        assert [await ones.next(5), await also_ones.next(5), await twos.next(5)] == ["a", "a", "b"]
        assert await ones.next(0.001) is None


async def test_listener_reconnects_after_its_backend_ends_and_reports_a_possible_gap(database):
    async with database.listen("one") as ones:
        await database.value(KILL_OTHERS)
        await database.run(sql("SELECT pg_notify('one', 'lost')"))
        async with asyncio.timeout(5):
            assert await anext(ones) is None
        await database.run(sql("SELECT pg_notify('one', 'after')"))
        assert await ones.next(5) == "after"


async def test_listener_detects_a_half_open_connection_by_heartbeat(opened, proxied, monkeypatch):
    monkeypatch.setattr(listen_module, "HEARTBEAT_INTERVAL_S", 0.02)
    monkeypatch.setattr("rota.infra.postgres.target.ANSWER_GRACE_S", 0.05)
    network, url = proxied
    remote = await opened(url, statement_timeout_s=0.05, connect_timeout_s=0.5)
    async with remote.listen("one") as ones:
        network.half_open()
        await until(lambda: not remote._listener._listening.is_set(), what="the heartbeat to fail")
        network.heal()
        network.reset()
        async with asyncio.timeout(5):
            assert await anext(ones) is None


async def test_slow_notification_consumer_drops_notifications_and_learns_of_the_gap(database, monkeypatch):
    monkeypatch.setattr(listen_module, "QUEUE_MAX", 3)
    async with database.listen("one") as ones, database.listen("done") as done:
        for n in range(10):
            await database.run(sql("SELECT pg_notify('one', $1)"), str(n))
        await database.run(sql("SELECT pg_notify('done', '')"))
        assert await done.next(5) == ""
        seen = [await ones.next(0.001) for _ in range(3)]
    assert None in seen


async def test_listen_connection_opens_with_the_first_listener_and_closes_with_the_database(opened, database):
    other = await opened()
    baseline = await database.value(SESSIONS)
    for _ in range(3):
        async with other.listen("one"):
            assert await database.value(SESSIONS) == baseline + 1
    await other.close()
    await until(lambda: fewer(database, baseline))


async def fewer(database, baseline):
    return await database.value(SESSIONS) < baseline


async def test_listen_during_close_is_refused_and_leaves_no_connection(opened, monkeypatch):
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


def test_postgres_target_limits_are_validated():
    with pytest.raises(AssertionError):
        PostgresTarget(url="postgresql://x", pool_min=3, pool_max=2)
    with pytest.raises(AssertionError):
        msgspec.structs.replace(PostgresTarget(url="postgresql://x", pool_min=0), pool_max=0).__post_init__()
