"""`rota db` and `rota audit`: the schema and the audit log, at `postgres.url` or in the local stack."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rota import runtime
from rota.cli.core import output
from rota.cli.core.output_format import OutputFormat
from rota.cli.local.up import local_url
from rota.infra import audit
from rota.infra.postgres import Database, PostgresTarget
from rota.infra.postgres.migrate import PhaseFilter
from rota.infra.postgres.migrate import migrate as apply_migrations
from rota.infra.postgres.migrate import status as migration_status
from rota.model.errors import InvalidSetting
from rota.model.settings import Settings


def _target(settings: Settings) -> PostgresTarget:
    url = settings.postgres.url or local_url(settings, "postgres")
    if not url:
        raise InvalidSetting("PostgreSQL is not configured: set postgres.url, or start a local one with `rota up`.")
    return runtime.postgres_target(settings, url)


@asynccontextmanager
async def open_database(settings: Settings) -> AsyncIterator[Database]:
    database = await Database.open(_target(settings))
    try:
        yield database
    finally:
        await database.close()


async def migrate(settings: Settings, *, phase: PhaseFilter, dry_run: bool, form: OutputFormat) -> None:
    done = await apply_migrations(_target(settings), phase, dry_run=dry_run)
    names = [migration.name for migration in done]
    if form.is_data:
        output.print_data({"dry_run": dry_run, "migrations": names}, form)
    elif names:
        output.print_text("\n".join(f"{'would apply' if dry_run else 'applied'} {name}" for name in names))
    else:
        output.print_text("The schema is up to date.")


async def status(settings: Settings, *, form: OutputFormat) -> int:
    lines = await migration_status(_target(settings))
    if form.is_data:
        output.print_data(lines, form)
    else:
        rows = [(line.name, line.phase, line.state, line.applied_at or "") for line in lines]
        output.print_table(("migration", "phase", "state", "applied"), rows)
    return 0 if all(line.state == "applied" for line in lines) else 1


async def verify_audit(settings: Settings, *, expect: str | None, form: OutputFormat) -> int:
    anchor = audit.ChainHead.parse(expect) if expect else None
    async with open_database(settings) as database:
        found = await audit.verify(database, anchor=anchor)
    problem = found.problem
    if form.is_data:
        output.print_data({"ok": found.ok, "checked": found.checked, "head": str(found.head), "problem": problem}, form)
    elif problem:
        output.print_text(f"Entry {problem.seq}: {problem.sentence}", style="bold red")
    else:
        output.print_text(f"{found.checked} entries are intact. Store this head elsewhere, for --expect:\n{found.head}")
    return 0 if found.ok else 1
