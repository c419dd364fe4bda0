"""Migrating a real database: once, by one migrator, whole or not at all, and never over a past that differs."""

import asyncio
import sys

import asyncpg
import pytest

from rota.infra import failpoints
from rota.infra.postgres import Database, PostgresTarget, check_current, migrate, status
from rota.infra.postgres.migration_files import (
    FUNCTIONS_REVISION,
    FunctionFile,
    checksum_of,
    discover,
    discover_functions,
    read_migration,
    sort_and_validate,
)
from rota.infra.postgres.sql import parse_query
from rota.model.errors import MigrationRefused
from tests.support.harness.databases import fresh_database
from tests.support.harness.servers import TEMPLATE_WITHOUT_DAYS
from tests.support.waiting import until

ALL = len(discover())
EVERYTHING = [each.name for each in (*discover(), *discover_functions())]


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
    assert names(await migrate(empty_database_url)) == EVERYTHING
    assert await migrate(empty_database_url) == []


async def test_dry_run_and_status_show_what_is_missing_and_change_nothing(empty_database_url):
    assert names(await migrate(empty_database_url, dry_run=True)) == EVERYTHING
    assert {line.state for line in await status(empty_database_url)} == {"pending"}
    assert names(await migrate(empty_database_url, dry_run=True)) == EVERYTHING
    connection = await asyncpg.connect(empty_database_url)
    assert await connection.fetchval("SELECT to_regnamespace('rota') IS NULL")
    await connection.close()


async def test_status_tells_when_each_was_applied(database_url):
    lines = await status(database_url)
    assert [line.name for line in lines] == EVERYTHING
    assert all(line.state == "applied" and line.applied_at for line in lines)


async def test_of_two_migrators_at_once_one_does_it_and_the_other_finds_nothing_to_do(empty_database_url):
    done = await asyncio.gather(*(migrate(empty_database_url) for _ in range(4)))
    assert sorted(len(applied) for applied in done) == [0, 0, 0, len(EVERYTHING)]


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
    assert [line.state for line in await status(database_url)][ALL] == "unknown"
    mended = made(pre_good="CREATE TABLE rota.good ()", pre_bad="CREATE TABLE rota.half ()")
    assert len(await migrate(database_url, migrations=mended)) == 1


async def test_a_file_edited_after_it_ran_is_refused_and_nothing_is_changed(database_url, admin):
    await migrate(database_url, migrations=made(pre_a="CREATE TABLE rota.a ()"))
    edited = made(pre_a="CREATE TABLE rota.a (n int)", pre_b="CREATE TABLE rota.b ()")
    with pytest.raises(MigrationRefused, match=f"{ALL + 1:04}_pre_a was edited after it was applied"):
        await migrate(database_url, migrations=edited)
    assert not await exists(admin, "b")


async def test_a_database_of_a_newer_rota_is_refused(database_url):
    await migrate(database_url, migrations=made(pre_new="CREATE TABLE rota.new ()"))
    with pytest.raises(MigrationRefused, match="newer version of Rota"):
        await migrate(database_url)


async def test_a_migration_does_not_wait_long_behind_a_reader(database_url, admin):
    await admin.execute("BEGIN; SELECT * FROM rota.migration")
    known = made(pre_wide="ALTER TABLE rota.migration ADD COLUMN extra int")
    async with asyncio.timeout(3):
        with pytest.raises(MigrationRefused, match="timed out waiting for a lock"):
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
        with pytest.raises(MigrationRefused, match="newer version of Rota"):
            await check_current(database)


async def test_new_replicas_may_start_before_their_post_migrations_ran(database):
    known = made(pre_a="CREATE TABLE rota.a ()", post_b="CREATE TABLE rota.b ()")
    with pytest.raises(MigrationRefused, match="pre_a"):
        await check_current(database, migrations=known)
    await migrate(database, "pre", migrations=known)
    await check_current(database, migrations=known)


def functions(text, name="test/functions/answers.sql"):
    return [FunctionFile(name, text, checksum_of(text))]


def answer(value):
    return f"CREATE OR REPLACE FUNCTION rota.answer() RETURNS int LANGUAGE sql AS 'SELECT {value}'"


async def test_functions_are_replaced_when_their_file_changes_and_only_then(database_url, admin):
    assert len(await migrate(database_url, migrations=discover(), functions=functions(answer(1)))) == 1
    assert await migrate(database_url, migrations=discover(), functions=functions(answer(1))) == []
    assert len(await migrate(database_url, migrations=discover(), functions=functions(answer(2)))) == 1
    assert await admin.fetchval("SELECT rota.answer()") == 2


async def test_functions_are_replaced_after_pre_and_before_post_migrations(database_url, admin):
    known = made(post_drop="DROP FUNCTION rota.answer()", pre_table="CREATE TABLE rota.answers (n int)")
    text = "CREATE OR REPLACE FUNCTION rota.answer() RETURNS SETOF rota.answers LANGUAGE sql AS 'TABLE rota.answers'"
    assert len(await migrate(database_url, migrations=known, functions=functions(text))) == 3
    assert await admin.fetchval("SELECT to_regproc('rota.answer') IS NULL")


async def test_functions_of_a_newer_revision_are_left_alone(database_url, admin):
    await migrate(database_url, migrations=discover(), functions=functions(answer(2)))
    await admin.execute("UPDATE rota.migration_function SET revision = $1", FUNCTIONS_REVISION + 1)
    assert await migrate(database_url, migrations=discover(), functions=functions(answer(1))) == []
    assert await admin.fetchval("SELECT rota.answer()") == 2


async def test_functions_that_fail_change_nothing(database_url, admin):
    await migrate(database_url, migrations=discover(), functions=functions(answer(1)))
    broken = [*functions(answer(2)), *functions("SELECT 1/0", name="test/functions/broken.sql")]
    with pytest.raises(MigrationRefused, match=r"could not be replaced \(division by zero\): they were rolled back"):
        await migrate(database_url, migrations=discover(), functions=broken)
    assert await admin.fetchval("SELECT rota.answer()") == 1


async def test_a_migrator_that_dies_before_functions_are_committed_leaves_them_to_the_next(database_url, admin, spawn):
    await admin.execute("DELETE FROM rota.migration_function WHERE name LIKE 'queue/%'")
    program = "import asyncio, os; from rota.infra.postgres import migrate; asyncio.run(migrate(os.environ['URL']))"
    died = await spawn(
        None,
        argv=[sys.executable, "-c", program],
        env={"URL": database_url, "CRASH_AT": "migrate.functions_before_commit"},
    )
    assert await died.wait() == failpoints.CRASH_EXIT_STATUS
    await until(lambda: no_migrator(admin))
    assert {each.name.split("/")[0] for each in await migrate(database_url)} == {"queue"}


async def no_migrator(admin):
    return not await admin.fetchval(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'rota migrate' AND datname = current_database()"
    )


async def test_a_server_refuses_functions_older_than_its_own(database, admin):
    await admin.execute("UPDATE rota.migration_function SET checksum = 'old' WHERE name = 'queue/functions/claims.sql'")
    with pytest.raises(MigrationRefused, match=r"lacks 1 migration.*claims\.sql: run `rota db migrate`"):
        await check_current(database)
    await admin.execute("UPDATE rota.migration_function SET revision = $1", FUNCTIONS_REVISION + 1)
    await check_current(database)


async def test_a_database_made_before_the_baseline_is_refused_with_what_to_do(database, admin, database_url):
    await admin.execute("UPDATE rota.migration SET name = '0001_pre_schema', checksum = 'x' WHERE number = 1")
    for refused in (migrate(database_url), check_current(database)):
        with pytest.raises(MigrationRefused, match="create a new database, or, if `rota up` created it, stop it and"):
            await refused
