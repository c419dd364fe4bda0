"""Migrating a real database: once, by one migrator, whole or not at all, and never over a past that differs."""

import asyncio
import sys

import asyncpg
import pytest

from rota.infra import failpoints
from rota.infra.postgres import Database, PostgresTarget, check_current, migrate, status
from rota.infra.postgres.migration_files import discover, read_migration, sort_and_validate
from rota.infra.postgres.sql import parse_query
from rota.model.errors import MigrationRefused
from tests.support.harness.databases import fresh_database
from tests.support.harness.servers import TEMPLATE_WITHOUT_DAYS
from tests.support.waiting import until

ALL = len(discover())


MIGRATORS = parse_query(
    "test.migrators",
    "-- Whether two are at it.\n"
    "SELECT count(*) = 2 FROM pg_stat_activity"
    " WHERE application_name = 'rota migrate' AND datname = current_database()",
)


def made(**texts):
    """Migrations of one test's own, numbered after those of Rota."""
    own = [read_migration(f"{ALL + n:04}_{name}.sql", text) for n, (name, text) in enumerate(texts.items(), start=1)]
    return sort_and_validate([*discover(), *own])


def names(migrations):
    return [migration.name for migration in migrations]


@pytest.fixture
def database_url(_admin, stack):
    """URL of a database of this test's own with every migration applied."""
    with fresh_database(_admin, stack, TEMPLATE_WITHOUT_DAYS) as url:
        yield url


@pytest.fixture
async def admin(database_url):
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close()


async def exists(admin, table):
    return await admin.fetchval("SELECT to_regclass($1) IS NOT NULL", f"rota.{table}")


async def test_an_empty_database_gets_everything_once(empty_database_url):
    assert names(await migrate(empty_database_url)) == names(discover())
    assert await migrate(empty_database_url) == []


async def test_dry_run_and_status_show_what_is_missing_and_change_nothing(empty_database_url):
    assert names(await migrate(empty_database_url, dry_run=True)) == names(discover())
    assert {line.state for line in await status(empty_database_url)} == {"pending"}
    assert names(await migrate(empty_database_url, dry_run=True)) == names(discover())
    connection = await asyncpg.connect(empty_database_url)
    assert await connection.fetchval("SELECT to_regnamespace('rota') IS NULL")
    await connection.close()


async def test_status_tells_when_each_was_applied(database_url):
    lines = await status(database_url)
    assert [line.name for line in lines] == names(discover())
    assert all(line.state == "applied" and line.applied_at for line in lines)


async def test_of_two_migrators_at_once_one_does_it_and_the_other_finds_nothing_to_do(empty_database_url):
    done = await asyncio.gather(*(migrate(empty_database_url) for _ in range(4)))
    assert sorted(len(applied) for applied in done) == [0, 0, 0, ALL]


async def test_a_migrator_that_waits_too_long_for_another_is_told_so(database_url, admin):
    await admin.execute("SELECT pg_advisory_lock(x'726F7461'::bigint)")
    with pytest.raises(MigrationRefused, match="Another process has been migrating"):
        await migrate(database_url, wait_s=0.01)


async def test_phases_are_applied_apart(database_url, admin):
    known = made(pre_a="CREATE TABLE rota.a ()", post_b="CREATE TABLE rota.b ()", pre_c="CREATE TABLE rota.c ()")
    assert len(await migrate(database_url, "pre", migrations=known)) == 2
    assert [await exists(admin, table) for table in "abc"] == [True, False, True]
    assert len(await migrate(database_url, "post", migrations=known)) == 1
    assert await exists(admin, "b")


async def test_a_failing_migration_leaves_nothing_and_is_named_with_the_servers_words(database_url, admin):
    known = made(pre_good="CREATE TABLE rota.good ()", pre_bad="CREATE TABLE rota.half (); SELECT 1/0")
    with pytest.raises(MigrationRefused, match=f"{ALL + 2:04}_pre_bad failed \\(division by zero\\)"):
        await migrate(database_url, migrations=known)
    assert await exists(admin, "good")
    assert not await exists(admin, "half")
    assert [line.state for line in await status(database_url)][-1] == "unknown"
    mended = made(pre_good="CREATE TABLE rota.good ()", pre_bad="CREATE TABLE rota.half ()")
    assert len(await migrate(database_url, migrations=mended)) == 1


async def test_a_file_edited_after_it_ran_is_refused_and_nothing_is_changed(database_url, admin):
    await migrate(database_url, migrations=made(pre_a="CREATE TABLE rota.a ()"))
    edited = made(pre_a="CREATE TABLE rota.a (n int)", pre_b="CREATE TABLE rota.b ()")
    with pytest.raises(MigrationRefused, match=f"{ALL + 1:04}_pre_a was edited after it ran"):
        await migrate(database_url, migrations=edited)
    assert not await exists(admin, "b")


async def test_a_database_of_a_newer_rota_is_refused(database_url):
    await migrate(database_url, migrations=made(pre_new="CREATE TABLE rota.new ()"))
    with pytest.raises(MigrationRefused, match="newer Rota"):
        await migrate(database_url)


async def test_a_migration_does_not_wait_long_behind_a_reader(database_url, admin):
    await admin.execute("BEGIN; SELECT * FROM rota.migration")
    known = made(pre_wide="ALTER TABLE rota.migration ADD COLUMN extra int")
    async with asyncio.timeout(3):
        with pytest.raises(MigrationRefused, match="did not get its lock"):
            await migrate(database_url, migrations=known, lock_timeout_s=0.01)
    await admin.execute("COMMIT")
    assert len(await migrate(database_url, migrations=known)) == 1


async def test_an_index_is_built_concurrently_outside_a_transaction(database_url, admin):
    text = "-- no transaction\nCREATE INDEX CONCURRENTLY IF NOT EXISTS by_name ON rota.migration (name)"
    assert len(await migrate(database_url, migrations=made(pre_index=text))) == 1
    assert await exists(admin, "by_name")


async def test_a_half_built_index_is_not_taken_for_a_good_one(database_url, admin):
    await admin.execute("CREATE TABLE rota.twin (n int); INSERT INTO rota.twin VALUES (1), (1)")
    text = "-- no transaction\nCREATE UNIQUE INDEX CONCURRENTLY IF NOT EXISTS one ON rota.twin (n)"
    with pytest.raises(MigrationRefused, match="could not create unique index"):
        await migrate(database_url, migrations=made(pre_index=text))
    await admin.execute("TRUNCATE rota.twin")
    with pytest.raises(MigrationRefused, match=r"DROP INDEX CONCURRENTLY (rota\.)?one"):
        await migrate(database_url, migrations=made(pre_index=text))
    await admin.execute("DROP INDEX CONCURRENTLY rota.one")
    assert len(await migrate(database_url, migrations=made(pre_index=text))) == 1


async def test_a_concurrent_index_and_a_waiting_migrator_do_not_wait_for_each_other(database, admin):
    """The waiter must hold no snapshot, or the index build would wait for it while it waits for the lock."""
    text = "-- no transaction\nCREATE INDEX CONCURRENTLY IF NOT EXISTS by_name ON rota.migration (name)"
    known = made(pre_index=text)
    # Its snapshot keeps the index from being finished before both are there.
    await admin.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT * FROM rota.migration")
    async with asyncio.TaskGroup() as group:
        first, second = (group.create_task(migrate(database, migrations=known)) for _ in range(2))
        await until(lambda: database.value(MIGRATORS))
        await admin.execute("COMMIT")
    assert sorted(len(task.result()) for task in (first, second)) == [0, 1]


@pytest.mark.parametrize("place", ["migrate.before_commit", "migrate.before_record"])
async def test_a_migrator_that_dies_half_way_leaves_a_database_that_the_next_one_finishes(
    empty_database_url, spawn, place
):
    program = (
        "import asyncio, os; from rota.infra.postgres import migrate;"
        " from rota.infra.postgres.migration_files import read_migration;"
        " asyncio.run(migrate(os.environ['URL'], migrations=[read_migration('0001_pre_a.sql', os.environ['TEXT'])]))"
    )
    text = {
        "migrate.before_commit": "CREATE TABLE rota.a (n int)",
        "migrate.before_record": "-- no transaction\nCREATE TABLE IF NOT EXISTS rota.a (n int)",
    }[place]
    process = await spawn(
        None, argv=[sys.executable, "-c", program], env={"URL": empty_database_url, "TEXT": text, "CRASH_AT": place}
    )
    assert await process.wait() == failpoints.CRASH_EXIT_STATUS
    done = await migrate(empty_database_url, migrations=[read_migration("0001_pre_a.sql", text)])
    assert names(done) == ["0001_pre_a"]


async def test_a_user_without_rights_is_told_which_grant_it_needs(empty_database_url):
    connection = await asyncpg.connect(empty_database_url)
    role = await connection.fetchval("SELECT 'plain_' || current_database()")
    await connection.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'plain'")
    scheme, _, rest = empty_database_url.partition("://")
    url = f"{scheme}://{role}:plain@{rest.partition('@')[2]}"
    try:
        with pytest.raises(MigrationRefused, match="GRANT CREATE ON DATABASE"):
            await migrate(url)
    finally:
        await connection.execute(f"DROP ROLE {role}")
        await connection.close()


async def test_servers_start_on_a_current_schema_only(empty_database_url):
    database = await Database.open(PostgresTarget(url=empty_database_url))
    with pytest.raises(MigrationRefused, match="run `rota db migrate`"):
        await check_current(database)
    await migrate(database)
    await check_current(database)
    await database.run(parse_query("edit", "-- Edit.\nUPDATE rota.migration SET checksum = 'x' WHERE number = 1"))
    with pytest.raises(MigrationRefused, match="edited"):
        await check_current(database)
    await database.close()


@pytest.mark.parametrize(("phase", "fits"), [("pre", True), ("post", False)])
async def test_old_replicas_may_start_beside_a_newer_rota_until_its_post_migrations_ran(database, phase, fits):
    await migrate(database, migrations=made(**{f"{phase}_new": "CREATE TABLE rota.new ()"}))
    if fits:
        await check_current(database)
    else:
        with pytest.raises(MigrationRefused, match="newer Rota"):
            await check_current(database)


async def test_new_replicas_may_start_before_their_post_migrations_ran(database):
    known = made(pre_a="CREATE TABLE rota.a ()", post_b="CREATE TABLE rota.b ()")
    with pytest.raises(MigrationRefused, match="pre_a"):
        await check_current(database, migrations=known)
    await migrate(database, "pre", migrations=known)
    await check_current(database, migrations=known)
