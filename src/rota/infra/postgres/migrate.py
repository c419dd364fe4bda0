"""Migrate a database to the schema that this version of Rota expects.

Invariants, and what enforces them:
- One migrator at a time: a session advisory lock. It is polled, because a session that waits in `pg_advisory_lock`
  holds a snapshot, and CREATE INDEX CONCURRENTLY waits for all older snapshots: the two would deadlock.
- A migration and its row in `rota.migration` are one transaction, so a crash leaves both or neither. A
  `-- no transaction` file is executed first and recorded afterwards; a crash in between executes it again, so it must
  use IF NOT EXISTS.
- Functions and triggers are replaced between the *pre* and the *post* migrations: all changed files in one transaction
  with their rows in `rota.migration_function`. Functions of a newer revision are not replaced.
- An applied migration never changes: a file with another checksum, or an applied migration without a file (applied by a
  newer version), is refused before any change.
- A migration waits at most `lock_timeout_s` for a lock: otherwise statements of the service would queue behind it while
  it waits for a long transaction.

If the commit outcome is unknown (lost reply), the error is raised; a second run finds out what was applied.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Literal, NamedTuple

import asyncpg
import msgspec
import structlog

from rota.infra import failpoints
from rota.infra.postgres import failures
from rota.infra.postgres.database import Database
from rota.infra.postgres.driver import Connection, Record, close_connection, connect
from rota.infra.postgres.migration_files import (
    FUNCTIONS_REVISION,
    FunctionFile,
    Migration,
    discover,
    discover_functions,
)
from rota.infra.postgres.sql import query
from rota.infra.postgres.target import PostgresTarget
from rota.model.errors import MigrationRefused

log = structlog.get_logger(__name__)

TABLE_EXISTS = query(__package__, "migration_table_exists")
APPLIED = query(__package__, "migrations_applied")
FUNCTIONS_APPLIED = query(__package__, "functions_applied")
RECORD_FUNCTION = query(__package__, "function_record")
RECORD = query(__package__, "migration_record")
INVALID_INDEXES = query(__package__, "invalid_indexes")
TRY_LOCK = query(__package__, "migration_try_lock")

# "rota" in ASCII. The value is arbitrary but must never change.
LOCK_KEY = 0x726F7461
LOCK_POLL_INTERVAL_S = 0.05
MIGRATION_TIMEOUT_S = 3600.0

CREATE_TABLE = """
CREATE SCHEMA IF NOT EXISTS rota;
CREATE TABLE IF NOT EXISTS rota.migration (
  number     int PRIMARY KEY,
  phase      text NOT NULL CHECK (phase IN ('pre', 'post')),
  name       text NOT NULL,
  checksum   text NOT NULL,
  applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE TABLE IF NOT EXISTS rota.migration_function (
  name       text PRIMARY KEY,
  checksum   text NOT NULL,
  revision   int NOT NULL,
  applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
)
"""
BEFORE_BASELINE = "0001_pre_schema"
"""First migration of the development versions; their 24 migrations were squashed into one baseline per package."""

PhaseFilter = Literal["pre", "post", "all"]
MigrationState = Literal["applied", "pending", "edited", "unknown"]


class AppliedMigration(msgspec.Struct, frozen=True):
    """A row of `rota.migration`."""

    number: int
    phase: str
    name: str
    checksum: str
    applied_at: datetime


class AppliedFunction(NamedTuple):
    """A row of `rota.migration_function`."""

    name: str
    checksum: str
    revision: int
    applied_at: datetime


class MigrationStatus(msgspec.Struct, frozen=True):
    """One line of `rota db status`; `unknown`: applied by a newer version of Rota."""

    name: str
    phase: str
    state: MigrationState
    applied_at: datetime | None


async def migrate(
    where: str | PostgresTarget | Database,
    phase: PhaseFilter = "all",
    *,
    dry_run: bool = False,
    migrations: Sequence[Migration] | None = None,
    functions: Sequence[FunctionFile] | None = None,
    lock_timeout_s: float = 5.0,
    wait_s: float = 60.0,
) -> list[Migration | FunctionFile]:
    """Apply pending migrations and changed functions, and return them; with `dry_run` only return them.

    Waits up to `wait_s` for another process that migrates the same database; usually nothing is pending afterwards.
    If `migrations` are given without `functions`, no functions are applied.
    """
    known, known_functions = _schema_files(migrations, functions)
    async with _session(where, lock_timeout_s) as connection:
        if not dry_run:
            await _lock(connection, wait_s)
        todo = pending(known, await _applied(connection), phase)
        replaced = [] if phase == "post" else await _changed_functions(connection, known_functions)
        if dry_run:
            return [*todo, *replaced]
        if todo or replaced:
            await _create_table(connection)
        # Functions are replaced between the phases: they need new tables, and post migrations may drop old functions.
        for migration in (each for each in todo if each.phase == "pre"):
            await _apply(connection, migration)
        if replaced:
            await _replace_functions(connection, replaced)
        for migration in (each for each in todo if each.phase == "post"):
            await _apply(connection, migration)
        return [*todo, *replaced]


def _schema_files(
    migrations: Sequence[Migration] | None, functions: Sequence[FunctionFile] | None
) -> tuple[Sequence[Migration], Sequence[FunctionFile]]:
    if migrations is None:
        return discover(), discover_functions() if functions is None else functions
    return migrations, functions or ()


async def status(
    where: str | PostgresTarget | Database, *, migrations: Sequence[Migration] | None = None
) -> list[MigrationStatus]:
    """Applied, pending, edited and unknown migrations; changes nothing."""
    known, functions = _schema_files(migrations, None)
    async with _session(where, lock_timeout_s=5.0) as connection:
        lines = compare(known, await _applied(connection))
        records = await _applied_functions(connection)
    return lines + [_function_status(each, records) for each in functions]


async def check_current(database: Database, *, migrations: Sequence[Migration] | None = None) -> None:
    """Refuse a schema that is incompatible with this code.

    Pending *post* migrations are allowed, because they wait until the last old replica has stopped. *pre* migrations
    and functions of a newer version are allowed, because they are compatible with old code: replicas of two versions
    may run, start and restart side by side.
    """
    known, functions = _schema_files(migrations, None)
    exists = await database.value(TABLE_EXISTS)
    applied = [_applied_from_row(row) for row in await database.rows(APPLIED)] if exists else []
    refuse_before_baseline(applied)
    refuse_newer([row for row in applied if row.phase == "post"], known)
    refuse_edited(applied, known)
    missing = [line.name for line in compare(known, applied) if line.state == "pending" and line.phase == "pre"]
    if not missing and functions:
        records = {row["name"]: AppliedFunction(*row) for row in await database.rows(FUNCTIONS_APPLIED)}
        missing = [each.name for each in changed_functions(functions, records)]
    if missing:
        raise MigrationRefused(
            f"The database at {database.target.address} lacks {len(missing)} migration(s), first {missing[0]}: run"
            " `rota db migrate`.",
            missing=missing,
        )


def compare(known: Sequence[Migration], applied: Sequence[AppliedMigration]) -> list[MigrationStatus]:
    """Compare files with the records of applied migrations, by number."""
    records = {row.number: row for row in applied}
    lines = [_status_of(migration, records.pop(migration.number, None)) for migration in known]
    return lines + [MigrationStatus(row.name, row.phase, "unknown", row.applied_at) for row in records.values()]


def pending(known: Sequence[Migration], applied: Sequence[AppliedMigration], phase: PhaseFilter) -> list[Migration]:
    """Pending migrations of `phase`; refuses a database whose applied migrations differ from these files."""
    refuse_before_baseline(applied)
    refuse_newer(applied, known)
    refuse_edited(applied, known)
    done = {row.number for row in applied}
    missing = [migration for migration in known if migration.number not in done]
    todo = [migration for migration in missing if phase in ("all", migration.phase)]
    for migration in missing if phase == "post" else ():
        if migration.phase == "pre" and todo and migration.number < todo[-1].number:
            raise MigrationRefused(
                f"The migration {todo[-1].name} must be applied after {migration.name}, which is pending: run"
                " `rota db migrate --phase pre` first."
            )
    return todo


def changed_functions(functions: Sequence[FunctionFile], records: Mapping[str, AppliedFunction]) -> list[FunctionFile]:
    """Files whose checksum differs from the applied one; none if the database has functions of a newer revision."""
    if any(record.revision > FUNCTIONS_REVISION for record in records.values()):
        return []
    return [each for each in functions if each.name not in records or records[each.name].checksum != each.checksum]


def refuse_before_baseline(applied: Sequence[AppliedMigration]) -> None:
    if any(row.name == BEFORE_BASELINE for row in applied):
        raise MigrationRefused(
            "The database was created by a development version of Rota and cannot be migrated: create a new database,"
            " or, if `rota up` created it, stop it and remove its data directory.",
            migration=BEFORE_BASELINE,
        )


def refuse_newer(applied: Sequence[AppliedMigration], known: Sequence[Migration]) -> None:
    numbers = {migration.number for migration in known}
    for row in applied:
        if row.number not in numbers:
            raise MigrationRefused(
                f"The database was migrated by a newer version of Rota ({row.name} is unknown): upgrade this one.",
                migration=row.name,
            )


def refuse_edited(applied: Sequence[AppliedMigration], known: Sequence[Migration]) -> None:
    checksums = {migration.number: migration.checksum for migration in known}
    for row in applied:
        if checksums.get(row.number, row.checksum) != row.checksum:
            raise MigrationRefused(
                f"The migration {row.name} was edited after it was applied on {row.applied_at:%Y-%m-%d}: restore the"
                " file, and make the change in a new migration.",
                migration=row.name,
            )


def _status_of(migration: Migration, row: AppliedMigration | None) -> MigrationStatus:
    if row is None:
        return MigrationStatus(migration.name, migration.phase, "pending", None)
    state: MigrationState = "applied" if row.checksum == migration.checksum else "edited"
    return MigrationStatus(migration.name, migration.phase, state, row.applied_at)


def _function_status(file: FunctionFile, records: Mapping[str, AppliedFunction]) -> MigrationStatus:
    state: MigrationState = "pending" if changed_functions([file], records) else "applied"
    record = records.get(file.name)
    return MigrationStatus(file.name, "pre", state, record.applied_at if record else None)


@asynccontextmanager
async def _session(where: str | PostgresTarget | Database, lock_timeout_s: float) -> AsyncIterator[Connection]:
    """A dedicated connection, because the advisory lock is bound to its session."""
    target = where.target if isinstance(where, Database) else where
    target = PostgresTarget(url=target) if isinstance(target, str) else target
    target = msgspec.structs.replace(
        target,
        application_name="rota migrate",
        lock_timeout_s=lock_timeout_s,
        statement_timeout_s=MIGRATION_TIMEOUT_S,
        idle_in_transaction_s=MIGRATION_TIMEOUT_S,
        idle_default_s=MIGRATION_TIMEOUT_S,
    )
    connection = await connect(target)
    try:
        yield connection
    except failures.FAILURES as error:
        lost = failures.on_statement(error, target, closed=connection.is_closed())
        if lost is None:
            raise
        raise lost from error
    finally:
        # Closing the session rolls back an open transaction and releases the advisory lock.
        await close_connection(connection)


async def _lock(connection: Connection, wait_s: float) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    while not await connection.fetchval(TRY_LOCK.text, LOCK_KEY):
        if loop.time() > deadline:
            raise MigrationRefused(
                f"Another process has been migrating this database for more than {wait_s:g} s: wait until it ends, then"
                " run `rota db migrate` again."
            )
        await asyncio.sleep(LOCK_POLL_INTERVAL_S)


async def _applied(connection: Connection) -> list[AppliedMigration]:
    if not await connection.fetchval(TABLE_EXISTS.text):
        return []
    return [_applied_from_row(row) for row in await connection.fetch(APPLIED.text)]


async def _applied_functions(connection: Connection) -> dict[str, AppliedFunction]:
    if not await connection.fetchval(TABLE_EXISTS.text):
        return {}
    return {row["name"]: AppliedFunction(*row) for row in await connection.fetch(FUNCTIONS_APPLIED.text)}


async def _changed_functions(connection: Connection, functions: Sequence[FunctionFile]) -> list[FunctionFile]:
    return changed_functions(functions, await _applied_functions(connection)) if functions else []


def _applied_from_row(row: Record) -> AppliedMigration:
    return AppliedMigration(row["number"], row["phase"], row["name"], row["checksum"], row["applied_at"])


async def _create_table(connection: Connection) -> None:
    try:
        await connection.execute(CREATE_TABLE)
    except asyncpg.InsufficientPrivilegeError as error:
        raise MigrationRefused(
            f"This user may not create the schema `rota` ({first_line(error)}): GRANT CREATE ON DATABASE to it, or run"
            " `rota db migrate` as the owner of the database."
        ) from error


async def _apply(connection: Connection, migration: Migration) -> None:
    try:
        if migration.in_transaction:
            await _apply_in_transaction(connection, migration)
        else:
            await _apply_without_transaction(connection, migration)
        log.info("migration_applied", migration=migration.name)
    except asyncpg.LockNotAvailableError as error:
        raise MigrationRefused(
            f"The migration {migration.name} timed out waiting for a lock that another session holds, and was not"
            " applied: run `rota db migrate` again when long transactions have ended.",
            migration=migration.name,
        ) from error
    except failures.SERVER_ERRORS as error:
        if isinstance(error, failures.CONNECTION_LOST_ERRORS):
            raise
        remedy = (
            "it was rolled back, so correct the cause"
            if migration.in_transaction
            else "drop the objects that it left incomplete"
        )
        raise MigrationRefused(
            f"The migration {migration.name} failed ({first_line(error)}): {remedy}, then run `rota db migrate` again.",
            migration=migration.name,
        ) from error


async def _replace_functions(connection: Connection, functions: Sequence[FunctionFile]) -> None:
    """Replace in one transaction, without validating bodies: functions may call each other in any order."""
    try:
        await connection.execute("BEGIN; SET LOCAL check_function_bodies = off")
        for file in functions:
            await connection.execute(file.text)
            await connection.execute(RECORD_FUNCTION.text, file.name, file.checksum, FUNCTIONS_REVISION)
        failpoints.hit("migrate.functions_before_commit")
        await connection.execute("COMMIT")
    except asyncpg.LockNotAvailableError as error:
        raise MigrationRefused(
            "The functions timed out waiting for a lock that another session holds, and were not replaced: run"
            " `rota db migrate` again when long transactions have ended."
        ) from error
    except failures.SERVER_ERRORS as error:
        if isinstance(error, failures.CONNECTION_LOST_ERRORS):
            raise
        raise MigrationRefused(
            f"The functions could not be replaced ({first_line(error)}): they were rolled back, so correct the cause,"
            " then run `rota db migrate` again."
        ) from error
    for file in functions:
        log.info("functions_replaced", file=file.name)


async def _apply_in_transaction(connection: Connection, migration: Migration) -> None:
    await connection.execute("BEGIN")
    await connection.execute(migration.text)
    assert connection.is_in_transaction(), f"{migration.name} must not end its transaction"
    await _record(connection, migration)
    failpoints.hit("migrate.before_commit")
    await connection.execute("COMMIT")


async def _apply_without_transaction(connection: Connection, migration: Migration) -> None:
    """One statement outside a transaction. It may wait for old transactions without a limit: it blocks no others."""
    await connection.execute("SET lock_timeout = 0")
    await connection.execute(migration.text)
    await connection.execute("RESET lock_timeout")
    invalid = [row["name"] for row in await connection.fetch(INVALID_INDEXES.text)]
    if invalid:
        raise MigrationRefused(
            f"The migration {migration.name} found the invalid index {invalid[0]} of an earlier attempt: run DROP INDEX"
            f" CONCURRENTLY {invalid[0]}, then `rota db migrate` again.",
            migration=migration.name,
        )
    failpoints.hit("migrate.before_record")
    await _record(connection, migration)


async def _record(connection: Connection, migration: Migration) -> None:
    await connection.execute(RECORD.text, migration.number, migration.phase, migration.name, migration.checksum)


def first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
