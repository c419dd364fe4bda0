"""Migrations of a real database: applied once, by one migrator, atomically, and never over a different history."""

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
ALL_NAMES = [each.name for each in (*discover(), *discover_functions())]


MIGRATORS = parse_query(
    "test.migrators",
    "-- Whether two are at it.\n"
    "SELECT count(*) = 2 FROM pg_stat_activity"
    " WHERE application_name = 'rota migrate' AND datname = current_database()",
)


def with_migrations(**texts):
    """Rota's migrations followed by those of one test."""
    own = [read_migration(f"{ALL + n:04}_{name}.sql", text) for n, (name, text) in enumerate(texts.items(), start=1)]
    return sort_and_validate([*discover(), *own])


def names(migrations):
    return [migration.name for migration in migrations]


@pytest.fixture
def database_url(_admin, stack):
    """URL of a private database with every migration applied."""
    with fresh_database(_admin, stack, TEMPLATE_WITHOUT_DAYS) as url:
        yield url


@pytest.fixture
async def admin(database_url):
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close()


async def exists(admin, table):
    return await admin.fetchval("SELECT to_regclass($1) IS NOT NULL", f"rota.{table}")


async def test_empty_database_gets_every_migration_once(empty_database_url):
    assert names(await migrate(empty_database_url)) == ALL_NAMES
    assert await migrate(empty_database_url) == []


async def test_dry_run_and_status_report_pending_migrations_and_change_nothing(empty_database_url):
    assert names(await migrate(empty_database_url, dry_run=True)) == ALL_NAMES
    assert {line.state for line in await status(empty_database_url)} == {"pending"}
    assert names(await migrate(empty_database_url, dry_run=True)) == ALL_NAMES
    connection = await asyncpg.connect(empty_database_url)
    assert await connection.fetchval("SELECT to_regnamespace('rota') IS NULL")
    await connection.close()


async def test_status_reports_when_each_migration_was_applied(database_url):
    lines = await status(database_url)
    assert [line.name for line in lines] == ALL_NAMES
    assert all(line.state == "applied" and line.applied_at for line in lines)


async def test_concurrent_migrators_apply_each_migration_once(empty_database_url):
    done = await asyncio.gather(*(migrate(empty_database_url) for _ in range(4)))
    assert sorted(len(applied) for applied in done) == [0, 0, 0, len(ALL_NAMES)]


async def test_migrator_waiting_too_long_for_another_is_refused(database_url, admin):
    await admin.execute("SELECT pg_advisory_lock(x'726F7461'::bigint)")
    with pytest.raises(MigrationRefused, match="Another process has been migrating"):
        await migrate(database_url, wait_s=0.01)


async def test_migration_phases_are_applied_separately(database_url, admin):
    known = with_migrations(
        pre_a="CREATE TABLE rota.a ()", post_b="CREATE TABLE rota.b ()", pre_c="CREATE TABLE rota.c ()"
    )
    assert len(await migrate(database_url, "pre", migrations=known)) == 2
    assert [await exists(admin, table) for table in "abc"] == [True, False, True]
    assert len(await migrate(database_url, "post", migrations=known)) == 1
    assert await exists(admin, "b")


async def test_failing_migration_rolls_back_and_is_named_with_the_server_error(database_url, admin):
    known = with_migrations(pre_good="CREATE TABLE rota.good ()", pre_bad="CREATE TABLE rota.half (); SELECT 1/0")
    with pytest.raises(MigrationRefused, match=f"{ALL + 2:04}_pre_bad failed \\(division by zero\\)"):
        await migrate(database_url, migrations=known)
    assert await exists(admin, "good")
    assert not await exists(admin, "half")
    assert [line.state for line in await status(database_url)][ALL] == "unknown"
    fixed = with_migrations(pre_good="CREATE TABLE rota.good ()", pre_bad="CREATE TABLE rota.half ()")
    assert len(await migrate(database_url, migrations=fixed)) == 1


async def test_migration_file_edited_after_it_ran_is_refused_and_nothing_changes(database_url, admin):
    await migrate(database_url, migrations=with_migrations(pre_a="CREATE TABLE rota.a ()"))
    edited = with_migrations(pre_a="CREATE TABLE rota.a (n int)", pre_b="CREATE TABLE rota.b ()")
    with pytest.raises(MigrationRefused, match=f"{ALL + 1:04}_pre_a was edited after it was applied"):
        await migrate(database_url, migrations=edited)
    assert not await exists(admin, "b")


async def test_database_migrated_by_a_newer_rota_is_refused(database_url):
    await migrate(database_url, migrations=with_migrations(pre_new="CREATE TABLE rota.new ()"))
    with pytest.raises(MigrationRefused, match="newer version of Rota"):
        await migrate(database_url)


async def test_migration_waits_only_the_lock_timeout_behind_a_reader(database_url, admin):
    await admin.execute("BEGIN; SELECT * FROM rota.migration")
    known = with_migrations(pre_wide="ALTER TABLE rota.migration ADD COLUMN extra int")
    async with asyncio.timeout(3):
        with pytest.raises(MigrationRefused, match="timed out waiting for a lock"):
            await migrate(database_url, migrations=known, lock_timeout_s=0.01)
    await admin.execute("COMMIT")
    assert len(await migrate(database_url, migrations=known)) == 1


async def test_index_is_built_concurrently_outside_a_transaction(database_url, admin):
    text = "-- no transaction\nCREATE INDEX CONCURRENTLY IF NOT EXISTS by_name ON rota.migration (name)"
    assert len(await migrate(database_url, migrations=with_migrations(pre_index=text))) == 1
    assert await exists(admin, "by_name")


async def test_invalid_index_left_by_a_failed_build_is_refused(database_url, admin):
    await admin.execute("CREATE TABLE rota.twin (n int); INSERT INTO rota.twin VALUES (1), (1)")
    text = "-- no transaction\nCREATE UNIQUE INDEX CONCURRENTLY IF NOT EXISTS one ON rota.twin (n)"
    with pytest.raises(MigrationRefused, match="could not create unique index"):
        await migrate(database_url, migrations=with_migrations(pre_index=text))
    await admin.execute("TRUNCATE rota.twin")
    with pytest.raises(MigrationRefused, match=r"DROP INDEX CONCURRENTLY (rota\.)?one"):
        await migrate(database_url, migrations=with_migrations(pre_index=text))
    await admin.execute("DROP INDEX CONCURRENTLY rota.one")
    assert len(await migrate(database_url, migrations=with_migrations(pre_index=text))) == 1


async def test_concurrent_index_build_and_waiting_migrator_do_not_deadlock(database, admin):
    """The waiting migrator must hold no snapshot: the index build would wait for it while it waits for the lock."""
    text = "-- no transaction\nCREATE INDEX CONCURRENTLY IF NOT EXISTS by_name ON rota.migration (name)"
    known = with_migrations(pre_index=text)
    # This snapshot delays the index build until both migrators have started.
    await admin.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT * FROM rota.migration")
    async with asyncio.TaskGroup() as group:
        first, second = (group.create_task(migrate(database, migrations=known)) for _ in range(2))
        await until(lambda: database.value(MIGRATORS))
        await admin.execute("COMMIT")
    assert sorted(len(task.result()) for task in (first, second)) == [0, 1]


@pytest.mark.parametrize("place", ["migrate.before_commit", "migrate.before_record"])
async def test_migrator_that_crashes_midway_leaves_a_database_the_next_one_completes(empty_database_url, spawn, place):
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


async def test_user_without_privileges_is_shown_the_missing_grant(empty_database_url):
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


async def test_server_starts_only_on_a_current_schema(empty_database_url):
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
async def test_old_replica_may_start_beside_a_newer_rota_until_its_post_migrations_ran(database, phase, fits):
    await migrate(database, migrations=with_migrations(**{f"{phase}_new": "CREATE TABLE rota.new ()"}))
    if fits:
        await check_current(database)
    else:
        with pytest.raises(MigrationRefused, match="newer version of Rota"):
            await check_current(database)


async def test_new_replica_may_start_before_its_post_migrations_ran(database):
    known = with_migrations(pre_a="CREATE TABLE rota.a ()", post_b="CREATE TABLE rota.b ()")
    with pytest.raises(MigrationRefused, match="pre_a"):
        await check_current(database, migrations=known)
    await migrate(database, "pre", migrations=known)
    await check_current(database, migrations=known)


def functions(text, name="test/functions/answers.sql"):
    return [FunctionFile(name, text, checksum_of(text))]


def answer(value):
    return f"CREATE OR REPLACE FUNCTION rota.answer() RETURNS int LANGUAGE sql AS 'SELECT {value}'"


async def test_functions_are_replaced_only_when_their_file_changed(database_url, admin):
    assert len(await migrate(database_url, migrations=discover(), functions=functions(answer(1)))) == 1
    assert await migrate(database_url, migrations=discover(), functions=functions(answer(1))) == []
    assert len(await migrate(database_url, migrations=discover(), functions=functions(answer(2)))) == 1
    assert await admin.fetchval("SELECT rota.answer()") == 2


async def test_functions_are_replaced_between_pre_and_post_migrations(database_url, admin):
    known = with_migrations(post_drop="DROP FUNCTION rota.answer()", pre_table="CREATE TABLE rota.answers (n int)")
    text = "CREATE OR REPLACE FUNCTION rota.answer() RETURNS SETOF rota.answers LANGUAGE sql AS 'TABLE rota.answers'"
    assert len(await migrate(database_url, migrations=known, functions=functions(text))) == 3
    assert await admin.fetchval("SELECT to_regproc('rota.answer') IS NULL")


async def test_functions_of_a_newer_revision_are_not_replaced(database_url, admin):
    await migrate(database_url, migrations=discover(), functions=functions(answer(2)))
    await admin.execute("UPDATE rota.migration_function SET revision = $1", FUNCTIONS_REVISION + 1)
    assert await migrate(database_url, migrations=discover(), functions=functions(answer(1))) == []
    assert await admin.fetchval("SELECT rota.answer()") == 2


async def test_failing_function_file_changes_nothing(database_url, admin):
    await migrate(database_url, migrations=discover(), functions=functions(answer(1)))
    broken = [*functions(answer(2)), *functions("SELECT 1/0", name="test/functions/broken.sql")]
    with pytest.raises(MigrationRefused, match=r"could not be replaced \(division by zero\): they were rolled back"):
        await migrate(database_url, migrations=discover(), functions=broken)
    assert await admin.fetchval("SELECT rota.answer()") == 1


async def test_migrator_that_crashes_before_the_function_commit_leaves_them_to_the_next(database_url, admin, spawn):
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


async def test_server_refuses_functions_older_than_its_own(database, admin):
    await admin.execute("UPDATE rota.migration_function SET checksum = 'old' WHERE name = 'queue/functions/claims.sql'")
    with pytest.raises(MigrationRefused, match=r"lacks 1 migration.*claims\.sql: run `rota db migrate`"):
        await check_current(database)
    await admin.execute("UPDATE rota.migration_function SET revision = $1", FUNCTIONS_REVISION + 1)
    await check_current(database)


async def test_database_created_before_the_baseline_is_refused_with_instructions(database, admin, database_url):
    await admin.execute("UPDATE rota.migration SET name = '0001_pre_schema', checksum = 'x' WHERE number = 1")
    for refused in (migrate(database_url), check_current(database)):
        with pytest.raises(MigrationRefused, match="create a new database, or, if `rota up` created it, stop it and"):
            await refused
