"""Bring a database to the schema that this Rota expects.

Invariants, and who keeps them:
- one migrator at a time: a session advisory lock. It is polled, because a session that *waits* in
  `pg_advisory_lock` holds a snapshot for which CREATE INDEX CONCURRENTLY would wait in turn, for ever;
- a migration and its row in `rota.migration` are one transaction, so dying anywhere leaves both or neither. A
  `-- no transaction` file is done first and recorded after; dying between the two runs it again, so it must say
  IF NOT EXISTS;
- what ran is never changed: an edited file (by checksum), an unknown one (a newer Rota was here) or a missing one is
  refused before anything is done;
- a migration waits at most `lock_timeout_s` for a lock, so a long reader fails the migration and not the service whose
  statements would queue up behind it.

A lost reply to COMMIT is raised as such; running the command again finds out what happened.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Literal

import asyncpg
import msgspec
import structlog

from rota.infra import faults
from rota.infra.postgres import failures
from rota.infra.postgres.database import Database
from rota.infra.postgres.driver import Connection, Record, connect, hang_up
from rota.infra.postgres.migration_files import Migration, discover
from rota.infra.postgres.sql import query
from rota.infra.postgres.target import PostgresTarget
from rota.model.errors import MigrationRefused

log = structlog.get_logger(__name__)

EXISTS = query(__package__, "migration_table_exists")
APPLIED = query(__package__, "migrations_applied")
RECORD = query(__package__, "migration_record")
INVALID = query(__package__, "invalid_indexes")
TRY_LOCK = query(__package__, "migration_try_lock")

# "rota" in ASCII; any constant will do as long as it never changes.
LOCK_KEY = 0x726F7461
LOCK_POLL_S = 0.05
MIGRATION_S = 3600.0

CREATE_TABLE = """
CREATE SCHEMA IF NOT EXISTS rota;
CREATE TABLE IF NOT EXISTS rota.migration (
  number     int PRIMARY KEY,
  phase      text NOT NULL CHECK (phase IN ('pre', 'post')),
  name       text NOT NULL,
  checksum   text NOT NULL,
  applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
)
"""

Wanted = Literal["pre", "post", "all"]
State = Literal["applied", "pending", "edited", "unknown"]


class Applied(msgspec.Struct, frozen=True):
    """A row of `rota.migration`."""

    number: int
    phase: str
    name: str
    checksum: str
    applied_at: datetime


class MigrationStatus(msgspec.Struct, frozen=True):
    """One line of `rota db status`; `unknown` was applied by a newer Rota."""

    name: str
    phase: str
    state: State
    applied_at: datetime | None


async def migrate(
    where: str | PostgresTarget | Database,
    phase: Wanted = "all",
    *,
    dry_run: bool = False,
    migrations: Sequence[Migration] | None = None,
    lock_timeout_s: float = 5.0,
    wait_s: float = 60.0,
) -> list[Migration]:
    """Apply what is missing, in order, and return it; with `dry_run` only return it and change nothing.

    Waits up to `wait_s` for another process that migrates the same database, and then usually finds nothing to do.
    """
    known = discover() if migrations is None else migrations
    async with _session(where, lock_timeout_s) as connection:
        if dry_run:
            return pending(known, await _applied(connection), phase)
        await _lock(connection, wait_s)
        todo = pending(known, await _applied(connection), phase)
        if todo:
            await _create_table(connection)
        for migration in todo:
            await _apply(connection, migration)
            log.info("migration_applied", migration=migration.name)
        return todo


async def status(
    where: str | PostgresTarget | Database, *, migrations: Sequence[Migration] | None = None
) -> list[MigrationStatus]:
    """What was applied, what is missing, what does not fit; changes nothing."""
    known = discover() if migrations is None else migrations
    async with _session(where, lock_timeout_s=5.0) as connection:
        return compare(known, await _applied(connection))


async def check_current(database: Database, *, migrations: Sequence[Migration] | None = None) -> None:
    """Refuse to work on a schema that does not suit this code.

    Missing *post* files are fine (they wait for the last old replica to go), and so are *pre* files of a newer Rota,
    which suit old code by definition: replicas of two versions may run, start and restart side by side.
    """
    known = discover() if migrations is None else migrations
    exists = await database.value(EXISTS)
    applied = [_as_applied(row) for row in await database.rows(APPLIED)] if exists else []
    refuse_newer([row for row in applied if row.phase == "post"], known)
    refuse_edited(applied, known)
    missing = [line.name for line in compare(known, applied) if line.state == "pending" and line.phase == "pre"]
    if missing:
        raise MigrationRefused(
            f"The database at {database.target.address} lacks {len(missing)} migration(s), first {missing[0]}: run"
            " `rota db migrate`.",
            missing=missing,
        )


def compare(known: Sequence[Migration], applied: Sequence[Applied]) -> list[MigrationStatus]:
    """Lay files and records side by side, by number."""
    records = {row.number: row for row in applied}
    lines = [_line(migration, records.pop(migration.number, None)) for migration in known]
    return lines + [MigrationStatus(row.name, row.phase, "unknown", row.applied_at) for row in records.values()]


def pending(known: Sequence[Migration], applied: Sequence[Applied], phase: Wanted) -> list[Migration]:
    """What `phase` still has to do; refuses a database whose past differs from these files."""
    refuse_newer(applied, known)
    refuse_edited(applied, known)
    done = {row.number for row in applied}
    missing = [migration for migration in known if migration.number not in done]
    todo = [migration for migration in missing if phase in ("all", migration.phase)]
    for migration in missing if phase == "post" else ():
        if migration.phase == "pre" and todo and migration.number < todo[-1].number:
            raise MigrationRefused(
                f"{todo[-1].name} comes after {migration.name}, which is not applied: run `rota db migrate --phase pre`"
                " first."
            )
    return todo


def refuse_newer(applied: Sequence[Applied], known: Sequence[Migration]) -> None:
    numbers = {migration.number for migration in known}
    for row in applied:
        if row.number not in numbers:
            raise MigrationRefused(
                f"The database was migrated by a newer Rota ({row.name} is unknown here): upgrade this Rota.",
                migration=row.name,
            )


def refuse_edited(applied: Sequence[Applied], known: Sequence[Migration]) -> None:
    checksums = {migration.number: migration.checksum for migration in known}
    for row in applied:
        if checksums.get(row.number, row.checksum) != row.checksum:
            raise MigrationRefused(
                f"The migration {row.name} was edited after it ran on {row.applied_at:%Y-%m-%d}: restore the file, and"
                " put the change into a new migration.",
                migration=row.name,
            )


def _line(migration: Migration, row: Applied | None) -> MigrationStatus:
    if row is None:
        return MigrationStatus(migration.name, migration.phase, "pending", None)
    state: State = "applied" if row.checksum == migration.checksum else "edited"
    return MigrationStatus(migration.name, migration.phase, state, row.applied_at)


@asynccontextmanager
async def _session(where: str | PostgresTarget | Database, lock_timeout_s: float) -> AsyncIterator[Connection]:
    """A connection of our own, because the advisory lock lives as long as its session."""
    target = where.target if isinstance(where, Database) else where
    target = PostgresTarget(url=target) if isinstance(target, str) else target
    target = msgspec.structs.replace(
        target,
        application_name="rota migrate",
        lock_timeout_s=lock_timeout_s,
        statement_timeout_s=MIGRATION_S,
        idle_in_transaction_s=MIGRATION_S,
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
        # The end of the session rolls back what is open and frees the advisory lock.
        await hang_up(connection)


async def _lock(connection: Connection, wait_s: float) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    while not await connection.fetchval(TRY_LOCK.text, LOCK_KEY):
        if loop.time() > deadline:
            raise MigrationRefused(
                f"Another process has been migrating this database for more than {wait_s:g} s: wait for it to end, then"
                " run this again."
            )
        await asyncio.sleep(LOCK_POLL_S)


async def _applied(connection: Connection) -> list[Applied]:
    if not await connection.fetchval(EXISTS.text):
        return []
    return [_as_applied(row) for row in await connection.fetch(APPLIED.text)]


def _as_applied(row: Record) -> Applied:
    return Applied(row["number"], row["phase"], row["name"], row["checksum"], row["applied_at"])


async def _create_table(connection: Connection) -> None:
    try:
        await connection.execute(CREATE_TABLE)
    except asyncpg.InsufficientPrivilegeError as error:
        raise MigrationRefused(
            f"This user may not create the schema `rota` ({first_line(error)}): GRANT CREATE ON DATABASE to it, or"
            " let an owner run `rota db migrate`."
        ) from error


async def _apply(connection: Connection, migration: Migration) -> None:
    try:
        if migration.in_transaction:
            await _apply_in_transaction(connection, migration)
        else:
            await _apply_alone(connection, migration)
    except asyncpg.LockNotAvailableError as error:
        raise MigrationRefused(
            f"The migration {migration.name} did not get its lock in time, because another session uses the table;"
            " nothing was changed: run it again when long transactions are over.",
            migration=migration.name,
        ) from error
    except failures.ANSWERS as error:
        if isinstance(error, failures.LOST):
            raise
        rest = "nothing of it remains" if migration.in_transaction else "drop what it left half done, then run it again"
        raise MigrationRefused(
            f"The migration {migration.name} failed ({first_line(error)}); {rest}.", migration=migration.name
        ) from error


async def _apply_in_transaction(connection: Connection, migration: Migration) -> None:
    await connection.execute("BEGIN")
    await connection.execute(migration.text)
    assert connection.is_in_transaction(), f"{migration.name} must not COMMIT"
    await _record(connection, migration)
    faults.at("migrate.before_commit")
    await connection.execute("COMMIT")


async def _apply_alone(connection: Connection, migration: Migration) -> None:
    """One statement outside a transaction. It blocks nobody, so it may wait for as long as old transactions last."""
    await connection.execute("SET lock_timeout = 0")
    await connection.execute(migration.text)
    await connection.execute("RESET lock_timeout")
    invalid = [row["name"] for row in await connection.fetch(INVALID.text)]
    if invalid:
        raise MigrationRefused(
            f"The migration {migration.name} found the index {invalid[0]} half built by an earlier attempt: DROP INDEX"
            f" CONCURRENTLY {invalid[0]}, then run `rota db migrate` again.",
            migration=migration.name,
        )
    faults.at("migrate.before_record")
    await _record(connection, migration)


async def _record(connection: Connection, migration: Migration) -> None:
    await connection.execute(RECORD.text, migration.number, migration.phase, migration.name, migration.checksum)


def first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
