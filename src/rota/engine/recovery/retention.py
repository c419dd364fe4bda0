"""Retention, run by one leader: creates partitions ahead, drops expired days, deletes keys and caps of ended jobs.

Finished jobs, frame ends and logs are partitioned by day (UTC). A day past its retention is dropped as a whole, so
there are no row-by-row deletes and no work for vacuum. Invariants:
- a row is always visible, and in one place: rows that the default partition took before their day was created move in
  the transaction that creates the day, in bounded batches, under a lock that readers wait for;
- dropping a day loses no needed row: frame ends of jobs that are live, or ended on a later day, are carried over first,
  until a query finds none. None can be added after that, since a row is written on the day it ends;
- caps leave the accounts after their job has ended and nothing of it is booked or counted; a retry finds them with the
  job. Redis is updated after the commit; if we die in between, a server that learns of our death does it;
- locks are held briefly: a lock not acquired within `LOCK_TIMEOUT_MS` is given up and the step retried.

Each step is a transaction that begins with the leader's fence, so a paused leader that wakes up changes nothing. After
a crash between two steps the next leader does the rest; repeating a step changes nothing. PostgreSQL's clock decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import date, datetime, timedelta
from functools import partial
from typing import Final

import structlog

from rota.accounting.service import AccountingService
from rota.engine.dispatch import metrics as waiting
from rota.infra import failpoints
from rota.infra.blob_store import BlobPointer, BlobStore
from rota.infra.lease import LeaderLoop, LeaderStep, Lease, Leases
from rota.infra.postgres import Database, Query, Transaction, query
from rota.infra.telemetry import metrics
from rota.model.errors import InvalidInput
from rota.model.ids import ShowId
from rota.model.jobs.submission import decode_details
from rota.model.settings.lifecycle import RetentionSettings
from rota.policy.approvals import FORGET as FORGET_APPROVALS

MISSING_DAYS = query(__package__, "upkeep_missing")
EXPIRED_DAYS = query(__package__, "upkeep_days")
MAKE_DAY = query(__package__, "upkeep_make")
DROP_DAY = query(__package__, "upkeep_drop")
CARRY_OVER = query(__package__, "upkeep_carry")
SET_LOCK_TIMEOUT = query(__package__, "upkeep_patience")
DELETE_CAPS = query(__package__, "upkeep_caps")
MAPS = query(__package__, "upkeep_items")
DELETE_KEYS = query(__package__, "upkeep_keys")
DELETE_OUTPUTS = query(__package__, "upkeep_outputs")
DELETE_WORKERS = query(__package__, "upkeep_workers")
POINTERS = query(__package__, "upkeep_pointers")
NOW = query(__package__, "upkeep_now")
STATES = query(__package__, "upkeep_states")
REASONS = query(__package__, "upkeep_reasons")

log = structlog.get_logger(__name__)

LEASE: Final = "rota:engine:upkeep"
TABLES: Final = ("job_done", "frame_end", "frame_log")
INTERVAL_S: Final = 60.0
STORE_INTERVAL_S: Final = 3600.0
CAPS_INTERVAL_S: Final = 300.0
LIVE_STATES: Final = ("PENDING", "APPROVAL_REQUIRED", "SCHEDULED", "DISPATCHED", "RUNNING")
DAYS_AHEAD: Final = 7
BATCH: Final = 10_000
BATCHES_MAX: Final = 1_000
"""Per step and round; the next round does the rest."""
LOCK_TIMEOUT_MS: Final = 200
LEASE_RETENTION_S: Final = 86_400.0

STEPS = metrics.counter("rota_upkeep", "Steps of the engine's maintenance by outcome.", labels=("step", "outcome"))
JOBS = metrics.gauge("rota_jobs", "Live jobs by state, counted by the leader.", labels=("state",))
OLDEST_JOB = metrics.gauge(
    "rota_job_state_oldest_seconds", "Age of the oldest job in a state, since it entered that state.", labels=("state",)
)
DAYS_MADE = metrics.counter("rota_days_made", "Daily partitions made, by table.", labels=("table",))
DAYS_DROPPED = metrics.counter("rota_days_dropped", "Daily partitions dropped, by table.", labels=("table",))
FRAME_ENDS_CARRIED = metrics.counter(
    "rota_frame_ends_carried", "Frame ends carried over to a later day, because their jobs are retained."
)


class RetentionMaintenance(LeaderLoop):
    def __init__(
        self,
        database: Database,
        leases: Leases,
        retention: RetentionSettings | None = None,
        *,
        store: BlobStore | None = None,
        accounting: AccountingService | None = None,
    ) -> None:
        super().__init__(leases, LEASE, kind="upkeep")
        self.database = database
        self.retention = retention or RetentionSettings()
        self._store = store
        self._accounting = accounting

    def begin_term(self, lease: Lease) -> Sequence[LeaderStep]:
        always = (
            *(self.make_days, self.drop_days, self.forget_keys, self.forget_outputs, self.forget_approvals),
            *(self.forget_workers, self.prune_leases, self.measure),
        )
        steps = [LeaderStep(work.__name__, INTERVAL_S, partial(work, lease)) for work in always]
        if self._store is not None:
            steps.append(LeaderStep("tidy_store", STORE_INTERVAL_S, partial(self.tidy_store, lease)))
        return [*steps, LeaderStep("forget_caps", CAPS_INTERVAL_S, partial(self.forget_caps, lease))]

    def end_term(self) -> None:
        # A former leader must not export these: values of two replicas would be added up.
        JOBS.clear()
        OLDEST_JOB.clear()

    def on_step_done(self, step: str, took_s: float) -> None:
        del took_s
        STEPS.labels(step, "done").inc()

    def on_step_failed(self, step: str, error: Exception) -> None:
        STEPS.labels(step, "busy").inc()
        log.info("maintenance_busy", step=step, reason=str(error))

    async def make_days(self, lease: Lease, *, now: datetime | None = None, batch: int = BATCH) -> int:
        """Create partitions for `DAYS_AHEAD` days, and for rows in a default partition; returns how many."""
        today = now or await self._now()
        made = 0
        for table in TABLES:
            for row in await self.database.rows(MISSING_DAYS, table, today, DAYS_AHEAD):
                made += await self._make_day(lease, table, row["day"], batch)
        return made

    async def drop_days(self, lease: Lease, *, before: datetime | None = None, batch: int = BATCH) -> int:
        """Drop days past their retention after carrying over the frame ends still needed; returns how many."""
        cutoff = before or await self._time_ago(self.retention.finished_jobs)
        dropped = 0
        for table in TABLES:
            for row in await self.database.rows(EXPIRED_DAYS, table, cutoff):
                if table == "frame_end":
                    await self._carry_over(lease, row["day"], batch)
                dropped += await self._drop_day(lease, table, row["day"])
        return dropped

    async def forget_keys(self, lease: Lease, *, before: datetime | None = None, batch: int = BATCH) -> int:
        """Delete idempotency keys past their retention whose jobs have ended: the keys may be used again."""
        cutoff = before or await self._time_ago(self.retention.idempotency_keys)
        return await self._delete_in_batches(lease, DELETE_KEYS, cutoff, batch)

    async def forget_outputs(self, lease: Lease, *, before: datetime | None = None, batch: int = BATCH) -> int:
        """Delete held outputs of jobs that are no longer retained; returns how many."""
        cutoff = before or await self._time_ago(self.retention.finished_jobs)
        return await self._delete_in_batches(lease, DELETE_OUTPUTS, cutoff, batch)

    async def forget_workers(self, lease: Lease, *, before: datetime | None = None, batch: int = BATCH) -> int:
        """Delete workers that ended before anything still retained."""
        cutoff = before or await self._time_ago(self.retention.finished_jobs)
        return await self._delete_in_batches(lease, DELETE_WORKERS, cutoff, batch)

    async def forget_approvals(self, lease: Lease, *, before: datetime | None = None, batch: int = BATCH) -> int:
        """Delete approvals decided before the retention of jobs; a granted approval is used within moments."""
        cutoff = before or await self._time_ago(self.retention.finished_jobs)
        return await self._delete_in_batches(lease, FORGET_APPROVALS, cutoff, batch)

    async def forget_caps(self, lease: Lease, *, batch: int = BATCH) -> int:
        """Delete the caps of ended jobs from the accounts; returns the number of jobs."""
        shows: Counter[ShowId] = Counter()
        for _ in range(BATCHES_MAX):
            async with self._fenced_transaction(lease) as tx:
                rows = {ShowId(row["pk_show"]): row["jobs"] for row in await tx.rows(DELETE_CAPS, batch)}
                failpoints.hit("upkeep.after_caps_before_commit")
            shows.update(rows)
            if sum(rows.values()) < batch:
                break
        if self._accounting is not None:
            for show in shows:
                await self._accounting.push_limits(show)
        return shows.total()

    async def prune_leases(self, _lease: Lease) -> int:
        return await self.leases.prune(LEASE_RETENTION_S)

    async def measure(self, _lease: Lease) -> None:
        found = {row["state"]: row for row in await self.database.rows(STATES)}
        for state in LIVE_STATES:
            JOBS.labels(state).set(found[state]["jobs"] if state in found else 0)
            OLDEST_JOB.labels(state).set(found[state]["oldest_s"] if state in found else 0.0)
        waiting.set_waiting_jobs({row["reason"]: row["jobs"] for row in await self.database.rows(REASONS)})

    async def tidy_store(self, _lease: Lease, *, before: datetime | None = None) -> None:
        """Delete unreferenced inputs and results. Safe to repeat and to run concurrently."""
        assert self._store is not None, "there is no blob store"
        cutoff = before or await self._time_ago(self.retention.finished_jobs)
        rows = await self.database.rows(POINTERS, cutoff)
        used = {row["pointer"] for row in rows if row["pointer"] and _is_pointer(row["pointer"])}
        used |= {decode_details(row["request"]).items_at for row in await self.database.rows(MAPS, cutoff)} - {""}
        await self._store.maintain(self.retention.finished_jobs, used)

    async def _make_day(self, lease: Lease, table: str, day: date, batch: int) -> int:
        made = 0
        for _ in range(BATCHES_MAX):
            async with self._fenced_transaction(lease) as tx:
                outcome = await tx.value(MAKE_DAY, table, day, batch)
                failpoints.hit("upkeep.after_day_made_before_commit")
            made += outcome in ("made", "part")
            if outcome in ("made", "there"):
                break
        DAYS_MADE.labels(table).inc(made)
        return made

    async def _carry_over(self, lease: Lease, day: date, batch: int) -> None:
        for _ in range(BATCHES_MAX):
            async with self._fenced_transaction(lease) as tx:
                carried = await tx.value(CARRY_OVER, day, batch)
                failpoints.hit("upkeep.after_carry_before_commit")
            FRAME_ENDS_CARRIED.inc(carried)
            if carried < batch:
                return

    async def _drop_day(self, lease: Lease, table: str, day: date) -> int:
        async with self._fenced_transaction(lease) as tx:
            if table == "frame_end" and await tx.value(CARRY_OVER, day, 1):
                return 0  # more rows than one round carries over: the next round goes on
            dropped = int(await tx.value(DROP_DAY, table, day))
            failpoints.hit("upkeep.after_drop_before_commit")
        DAYS_DROPPED.labels(table).inc(dropped)
        log.info("day_dropped", table=table, day=day.isoformat())
        return dropped

    async def _delete_in_batches(self, lease: Lease, forget: Query, before: datetime, batch: int) -> int:
        deleted = 0
        for _ in range(BATCHES_MAX):
            async with self._fenced_transaction(lease) as tx:
                number = await tx.run(forget, before, batch)
            deleted += number
            if number < batch:
                break
        return deleted

    async def _now(self) -> datetime:
        now: datetime = await self.database.value(NOW)
        return now

    async def _time_ago(self, seconds: float) -> datetime:
        return await self._now() - timedelta(seconds=seconds)

    @asynccontextmanager
    async def _fenced_transaction(self, lease: Lease) -> AsyncIterator[Transaction]:
        async with self.database.transaction() as tx:
            await self.leases.guard(tx, lease)
            await tx.run(SET_LOCK_TIMEOUT, str(LOCK_TIMEOUT_MS))
            yield tx


def _is_pointer(text: str) -> bool:
    """Names of artifacts that a worker reports need not be pointers into the store."""
    with suppress(InvalidInput):
        BlobPointer.parse(text)
        return True
    return False
