"""`rota doctor`: checks everything Rota needs, and says how to fix problems. Read-only.

Each check has a timeout. When a server does not answer, one check fails and the checks that depend on it are skipped.
The exit status is 1 when a check failed; warnings alone leave it 0.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Sequence
from datetime import UTC
from pathlib import Path
from typing import Any, Final

import msgspec
import redis.asyncio

from rota import runtime
from rota.accounting import audit as auditing
from rota.accounting.live import ledger, limits, reconcile, release_publisher, seeding
from rota.accounting.service import AccountingService
from rota.cli.core.output import StyledText
from rota.cli.core.tables import CliPage, Table
from rota.cli.doctor import policy_checks
from rota.cli.doctor import view as doctor_view
from rota.cli.doctor.view import STUCK_AGE_S, DoctorCheck, Grade, fail, ok, skipped, warn
from rota.cli.local.up import data_dir, read_up_info
from rota.engine.queries.workers import worker_records
from rota.engine.recovery.reconciler import LEASE
from rota.infra import redis as redis_infra
from rota.infra.breaker import machine
from rota.infra.nats import Bus
from rota.infra.nats.topology import streams
from rota.infra.outbox.relay import DEPTH_COUNT_MAX, DEPTH_NOW
from rota.infra.postgres import Database, Record, query
from rota.infra.postgres.migrate import status as migration_status
from rota.infra.redis import RedisKeys, translate_errors
from rota.model.errors import RotaError
from rota.model.heartbeats import silent_after_s
from rota.model.settings import Settings
from rota.model.settings.masking import masked_url
from rota.placement import snapshot
from rota.queue import storage_report

DATABASE_FACTS = query(__package__, "doctor")
SCRIPTS: Final = (
    ledger.BOOK,
    release_publisher.RELEASE,
    limits.WRITE_LIMITS,
    seeding.SEED,
    reconcile.COUNT,
    reconcile.SETTLE,
    snapshot.WRITE,
    machine.STEP,
)
CHECK_TIMEOUT_S: Final = 20.0
_POSTGRES_CHECKS: Final = (
    "schema",
    "connections",
    "clock of PostgreSQL",
    "servers",
    "outbox",
    "jobs",
    "queue",
    "books",
)
_REDIS_CHECKS: Final = ("clock of Redis", "scripts")


async def run_checks(settings: Settings) -> list[DoctorCheck]:
    up = read_up_info(settings)
    urls = (msgspec.structs.asdict(up.urls) if up else {}) | runtime.configured_urls(settings)
    of_redis: list[DoctorCheck] = []
    client = await _connect_redis(settings, urls.get("redis"), of_redis)
    try:
        found = await _check_postgres(settings, urls.get("postgres"), client)
    finally:
        if client is not None:
            await client.aclose()
    of_nats = await _check_nats(settings, urls.get("nats"))
    of_policy = await _with_timeout("policy", policy_checks.check_policy(settings))
    return [*found, *of_redis, *of_nats, *of_policy, *await asyncio.to_thread(_check_disks, settings)]


async def _check_postgres(settings: Settings, url: str | None, client: redis.asyncio.Redis | None) -> list[DoctorCheck]:
    if not url:
        none = fail("PostgreSQL", "Not configured.", "Set postgres.url, or start a local one with `rota up`.")
        return [none, *skipped(_POSTGRES_CHECKS, "there is no PostgreSQL")]
    try:
        database = await Database.open(runtime.postgres_target(settings, url))
    except RotaError as error:
        away = fail("PostgreSQL", error.sentence, "Check that it runs and that postgres.url is correct.")
        return [away, *skipped(_POSTGRES_CHECKS, "PostgreSQL does not answer")]
    try:
        return await _check_database(settings, database, client)
    finally:
        await database.close()


async def _check_database(
    settings: Settings, database: Database, client: redis.asyncio.Redis | None
) -> list[DoctorCheck]:
    schema = await _with_timeout("schema", _check_schema(database))
    if schema[0].grade is Grade.FAIL:
        others = [name for name in _POSTGRES_CHECKS if name != "schema"]
        return [ok("PostgreSQL", "It answers."), *schema, *skipped(others, "the schema has the wrong version")]
    began, at_s = time.monotonic(), time.time()
    facts = await database.row(DATABASE_FACTS, LEASE, STUCK_AGE_S)
    took_s = time.monotonic() - began
    assert facts is not None, "it is one row"
    depth = await database.row(DEPTH_NOW, DEPTH_COUNT_MAX)
    assert depth is not None, "it is one row"
    return [
        doctor_view.postgres_check(facts["version"], facts["number"]),
        *schema,
        doctor_view.connections_check(facts["connected"], facts["most"]),
        doctor_view.clock_check("PostgreSQL", facts["now_s"] - at_s - took_s / 2, took_s),
        doctor_view.servers_check(facts["leader"], facts["dispatchers"]),
        *await _with_timeout("workers", _check_workers(settings, database, client, facts)),
        doctor_view.jobs_check(facts["ending"], facts["pending"], facts["orphans"]),
        doctor_view.outbox_check(depth["depth"], depth["oldest_age_s"], depth["parked"]),
        *await _with_timeout("queue", _check_queue(database)),
        *await _with_timeout("books", _check_ledger(database, client, settings)),
    ]


async def _check_schema(database: Database) -> list[DoctorCheck]:
    lines = await migration_status(database)
    unknown = [line.name for line in lines if line.state not in ("applied", "pending")]
    missing = [line.name for line in lines if line.state == "pending"]
    if unknown:
        remedy = "Run the version of Rota that created it; `rota db status` shows the difference."
        return [
            fail("schema", f"{unknown[0]} in the database differs from this version of Rota.", remedy, strange=unknown)
        ]
    if missing:
        remedy = "`rota db migrate` applies them."
        return [fail("schema", f"{len(missing)} migrations are missing, first {missing[0]}.", remedy, missing=missing)]
    return [ok("schema", f"All {len(lines)} migrations are applied.", migrations=len(lines))]


async def _check_workers(
    settings: Settings, database: Database, client: redis.asyncio.Redis | None, facts: Record
) -> list[DoctorCheck]:
    """Worker states come from PostgreSQL, heartbeat ages from the snapshot that servers keep in Redis.

    That one is itself up to an interval old, or two if its writer was replaced.
    """
    old_s = 2 * settings.registry.snapshot_interval
    ages = await _heartbeat_ages_s(client) if client is not None else {}
    silent = [
        each.name
        for each in await worker_records(database)
        if ages.get(str(each.id), 0.0) > silent_after_s(each.heartbeat_s) + old_s
    ]
    return [doctor_view.workers_check(facts["workers"], silent, facts["lost"])]


async def _heartbeat_ages_s(client: redis.asyncio.Redis) -> dict[str, float]:
    """Age of the last heartbeat by worker id; empty when no server has written a snapshot yet."""
    with translate_errors(client):
        document = await client.get(RedisKeys().workers_snapshot())
        seconds, micros = await client.time()
    if document is None:
        return {}
    registry = msgspec.json.decode(document, type=snapshot.RegistrySnapshot)
    since_s = seconds + micros / 1e6 - registry.captured_at.replace(tzinfo=UTC).timestamp()
    return {each.worker_id: since_s + each.age_ms / 1000 for each in registry.workers}


async def _check_queue(database: Database) -> list[DoctorCheck]:
    state = await storage_report.storage_state(database)
    pinning = [session for session in await storage_report.long_transactions(database) if session.pins or session.slots]
    if pinning:
        who = ", ".join(f"{each.application or 'process'} {each.pid}" for each in pinning[:3])
        text = f"{len(pinning)} long transactions prevent old rows from being removed: {who}."
        return [warn("queue", text, "End them, or make their program commit sooner.", sessions=pinning)]
    if not state.counters_trusted:
        return [warn("queue", "Counters are off, so counts scan rows.", "`rota queue rebuild-counts` turns them on.")]
    return [ok("queue", "Counters are on, and no long transaction blocks cleanup.", keeper=state.keeper)]


async def _check_ledger(
    database: Database, client: redis.asyncio.Redis | None, settings: Settings
) -> list[DoctorCheck]:
    live = client if settings.accounting.redis.enabled else None
    accounting = AccountingService(database, live)
    shows = await accounting.admin.shows()
    if live is None and any(show.managed for show in shows):
        return skipped(["books"], "Redis, which has accounts of some shows, does not answer")
    found = [await auditing.audit(accounting, show) for show in shows]
    wrong = [each.show.name for each in found if not each.ok]
    if wrong:
        remedy = "`rota ledger audit` shows every key, `--repair` sets them to PostgreSQL's values."
        return [fail("books", f"The accounts of {', '.join(wrong[:5])} do not agree.", remedy, shows=wrong)]
    keys = sum(len(each.lines) for each in found)
    return [ok("books", f"{keys} keys of {len(shows)} shows agree in PostgreSQL and Redis.", keys=keys)]


async def _connect_redis(settings: Settings, url: str | None, found: list[DoctorCheck]) -> redis.asyncio.Redis | None:
    """A client if Redis answers, otherwise None; appends its checks to `found`."""
    if not url:
        found += [fail("Redis", "Not configured.", "Set redis.url, or start a local one with `rota up`.")]
        found += skipped(_REDIS_CHECKS, "there is no Redis")
        return None
    client = redis_infra.connect(runtime.redis_target(settings, url))
    try:
        await redis_infra.check_server(client)
        found += await _with_timeout("Redis", _check_redis(client))
    except RotaError as error:
        await client.aclose()
        found += [fail("Redis", error.sentence, f"Check that {masked_url(url)} runs and is configured as required.")]
        found += skipped(_REDIS_CHECKS, "Redis does not answer or is not suitable")
        return None
    return client


async def _check_redis(client: redis.asyncio.Redis) -> list[DoctorCheck]:
    with translate_errors(client):
        info: dict[str, Any] = await client.info()
        began, at_s = time.monotonic(), time.time()
        seconds, micros = await client.time()
        took_s = time.monotonic() - began
        loaded = await client.script_exists(*(script.sha for script in SCRIPTS))
    return [
        _check_redis_memory(info),
        doctor_view.clock_check("Redis", seconds + micros / 1e6 - at_s - took_s / 2, took_s),
        ok("scripts", f"{sum(loaded)} of {len(loaded)} are loaded; the others load on first use."),
    ]


def _check_redis_memory(info: dict[str, Any]) -> DoctorCheck:
    kind = "Valkey" if "valkey_version" in info else "Redis"
    version = info.get("valkey_version", info["redis_version"])
    used, most = int(info["used_memory"]), int(info.get("maxmemory", 0))
    facts = {"version": version, "used_bytes": used, "max_bytes": most, "clients": int(info["connected_clients"])}
    text = f"{kind} {version} answers, {info['used_memory_human']} in use."
    if most and used > 0.9 * most:
        return warn("Redis", f"{text[:-1]} of {info['maxmemory_human']}.", "Raise its maxmemory.", **facts)
    return ok("Redis", text, **facts)


async def _check_nats(settings: Settings, url: str | None) -> list[DoctorCheck]:
    if not url:
        none = fail("NATS", "Not configured.", "Set nats.url, or start a local one with `rota up`.")
        return [none, *skipped(["streams"], "there is no NATS")]
    try:
        bus = await Bus.connect(runtime.nats_target(settings, url))
    except RotaError as error:
        away = fail("NATS", error.sentence, "Check that it runs with JetStream and that nats.url is correct.")
        return [away, *skipped(["streams"], "NATS does not answer")]
    try:
        version = bus.server_version
        return [
            ok("NATS", f"Version {version} answers.", version=version),
            *await _with_timeout("streams", _check_streams(bus, settings)),
        ]
    finally:
        await bus.close()


async def _check_streams(bus: Bus, settings: Settings) -> list[DoctorCheck]:
    sizes = {spec.name: await bus.stream_state(spec.name) for spec in streams(settings.nats)}
    missing = [name for name, size in sizes.items() if size is None]
    if missing:
        text = f"There is no stream {' and '.join(missing)}."
        return [
            fail("streams", text, "A server creates them when it starts: `rota up` or `rota server`.", missing=missing)
        ]
    parts = ", ".join(f"{name} holds {size.messages} messages" for name, size in sizes.items() if size is not None)
    return [ok("streams", f"{parts}.", **sizes)]


def _check_disks(settings: Settings) -> list[DoctorCheck]:
    """Disks that this machine can see: the local stack's and the blob store's."""
    paths = {"disk": data_dir(settings)} if read_up_info(settings) else {}
    if settings.store.directory:
        paths["disk of the store"] = Path(settings.store.directory)
    found = []
    for name, path in paths.items():
        try:
            usage = shutil.disk_usage(path)
        except OSError as error:
            found.append(fail(name, f"{path} cannot be read ({error.strerror}).", "Check that it exists."))
        else:
            found.append(doctor_view.disk_check(name, str(path), usage.free, usage.total))
    return found or skipped(["disk"], "servers and store are on other machines")


async def _with_timeout(name: str, checks: Awaitable[list[DoctorCheck]]) -> list[DoctorCheck]:
    """Run a check; a timeout or a Rota error becomes a failed check."""
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            return await checks
    except TimeoutError:
        return [fail(name, f"No answer within {CHECK_TIMEOUT_S:.0f} s.", "Check the load of the server.")]
    except RotaError as error:
        return [fail(name, error.sentence, "Fix that and run `rota doctor` again.")]


def checks_page(found: Sequence[DoctorCheck]) -> CliPage:
    failed = [check for check in found if check.grade is Grade.FAIL]
    warned = [check for check in found if check.grade is Grade.WARN]
    data = {"ok": not failed, "checks": [msgspec.to_builtins(check, enc_hook=str) for check in found]}
    rows = [(_GRADE_LABELS[check.grade], check.name, check.sentence) for check in found]
    parts: list[str | Table] = [Table(("", "check", "found"), rows)]
    if failed or warned:
        parts += ["", *(f"{check.name}: {check.remedy}" for check in (*failed, *warned))]
    else:
        parts += ["", "All checks passed."]
    return CliPage(data, parts)


_GRADE_LABELS: Final = {
    Grade.OK: StyledText("ok", "green"),
    Grade.WARN: StyledText("WARN", "bold yellow"),
    Grade.FAIL: StyledText("FAIL", "bold red"),
    Grade.SKIPPED: StyledText("-", "dim"),
}
