"""The reconciler, run by one leader: expires silent workers, requeues lost frames, ends overdue jobs.

Every step starts from the state in PostgreSQL, changes it through the same fenced paths as the rest of the engine
(closures and procs), and is safe to repeat. Only the decision that a worker is lost rests on *missing* heartbeats:
- it is written under the leader's fence, so a paused leader that wakes up cannot declare a worker lost;
- it is made only while the leader receives its own heartbeats, and has done so for longer than a worker may be silent;
- an overdue worker is asked for a heartbeat first, since one message may be lost, and the leader's own heartbeat has
  passed through NATS after that;
- from then on PostgreSQL has the decision: the worker's procs end as lost, the next pass finds later bookings on it,
  and its reports are refused. The worker learns of it, stops its frames and registers again under a new id.

Most ticks find nothing. So a tick asks with one statement what there is to do, and workers are read only every
`WORKERS_READ_INTERVAL_S` while all of them are heard.

A pass is bounded: at most `max_iterations_per_tick` batches of `reconciler.batch_size`. A job whose
transaction keeps failing does not block others: after `max_retries_per_job` retries it is skipped for `poll_interval`.

A frame is lost in transit when a heartbeat of its worker does not list it, came `DELIVERY_S` or more after the booking,
and every report that the worker had sent until then has been handled. Workers that this replica knows only from the
snapshot have sent it no heartbeat, so nothing is concluded from the frames they do not list.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple, TypeVar
from uuid import UUID

import msgspec
import structlog

from rota.engine.backends import Backends
from rota.engine.cluster.membership import ClusterMembership
from rota.engine.completion import report_consumer
from rota.engine.completion.finisher import Finisher
from rota.engine.completion.publisher import CompletionResult
from rota.engine.completion.retry_decision import WORKER_LOST
from rota.engine.dispatch.state_writer import JobStateChange
from rota.infra.clock import Clock, SystemClock
from rota.infra.lease import LeaderLoop, LeaderStep, Lease
from rota.infra.postgres import query
from rota.infra.telemetry import metrics
from rota.model.attempt_codes import AttemptCode
from rota.model.error_reactions import is_outage
from rota.model.errors import NatsUnavailable
from rota.model.heartbeats import silent_after_s
from rota.model.ids import JobId
from rota.model.job_states import RESCHEDULE_AFTER_S, JobState
from rota.model.jobs.work import Work
from rota.model.protocol import (
    CANCEL_SUBJECT,
    LIVENESS_SUBJECT,
    AttemptResult,
    AttemptStatus,
    CancelFrames,
    WorkerLiveness,
    encode,
)
from rota.model.reasons import Reason
from rota.model.settings.lifecycle import ReconcilerSettings
from rota.model.token_ranges import TokenRange, to_ranges
from rota.placement import WorkerRegistry

LIVE_WORKERS = query(__package__, "workers_up")
END_WORKER = query(__package__, "worker_end")
ENDED_WORKERS = query(__package__, "workers_gone")
ORPHANED_PROCS = query(__package__, "procs_orphaned")
ALL_PROCS = query(__package__, "procs_all")
ENDING_JOBS = query(__package__, "jobs_ending")
OVERDUE_JOBS = query(__package__, "jobs_overdue")
PENDING_WORK = query(__package__, "pending_work")
RELEASE_MISSED_DEPENDENTS = query(__package__, "jobs_forgotten")
MARK_BOOKED = query(__package__, "jobs_mark_booked")
RESCHEDULE = query(__package__, "jobs_reschedule")

log = structlog.get_logger(__name__)
T = TypeVar("T")

LEASE: Final = "rota:reconciler:default"
TICK_INTERVAL_S: Final = 0.5
OVERDUE_MARGIN_S: Final = 0.5
"""A heartbeat is overdue this long after its interval."""
ASKED_AT_ONCE_MAX: Final = 1000
WORKERS_READ_INTERVAL_S: Final = 2.0
"""Workers are read this often while all are heard; one whose heartbeat is overdue, or unknown, at every tick."""
FIRST_HEARTBEAT_TIMEOUT_S: Final = 10.0
"""Limit for the first heartbeat: after registration, and after this replica began to listen. NATS clients reconnect
within 5 s."""
ALLOCATION_CHECK_INTERVAL_S: Final = 5.0
DELIVERY_S: Final = 8.0
"""A booking reaches its worker within this time."""
BROADCAST_INTERVAL_S: Final = 5.0
LOST_BROADCAST_S: Final = 600.0
BATCH: Final = 512
PAGE_SIZE: Final = 4096
GRACE_S: Final = 60.0
"""Added to a frame's time limit, so that its worker can end it first."""

LOST_WORKERS = metrics.counter("rota_workers_lost", "Workers declared lost after their heartbeats stopped.")
STALE_JOBS = metrics.gauge("rota_stale_jobs", "Overdue jobs found by the last pass.", labels=("state",))
UNREPORTED_FRAMES = metrics.counter("rota_frames_unheld", "Frames that were booked and never reached their worker.")

_WORK = msgspec.msgpack.Decoder(Work)


class HeartbeatSnapshot:
    """The frames and the report number in a worker's last heartbeat, and when it came."""

    def __init__(self, held: Sequence[TokenRange], reported: int, received_at: float) -> None:
        self.reported = reported
        self.received_at = received_at
        self._held = held
        self._firsts = [first for first, _ in held]

    def holds(self, token: int) -> bool:
        at = bisect_right(self._firsts, token) - 1
        return at >= 0 and token < self._held[at][0] + self._held[at][1]


class PendingWork(NamedTuple):
    """What there is to do, as of `read_at_s`."""

    overdue: bool
    """Jobs are past their deadline or max_wait, or are being terminated."""
    active: bool
    """Frames are booked, or jobs are DISPATCHED or RUNNING."""
    read_at_s: float


class EngineReconciler(LeaderLoop):
    def __init__(
        self,
        backends: Backends,
        registry: WorkerRegistry,
        members: ClusterMembership,
        finisher: Finisher,
        on_completion: Callable[[CompletionResult], None],
        limits: ReconcilerSettings,
    ) -> None:
        super().__init__(backends.leases, LEASE, kind="reconciler")
        self.database = backends.database
        self.bus = backends.bus
        self.registry = registry
        self.members = members
        self.finisher = finisher
        self.canceller = finisher.canceller
        self._on_completion = on_completion
        self._limits = limits
        self._clock: Clock = SystemClock()
        self._events = finisher.publisher.events
        self._elected_at = 0.0
        self._lost: dict[UUID, float] = {}
        self._orphans_until = 0.0
        self._skipped_until: dict[UUID, float] = {}
        self._draining: set[UUID] = set()
        self._idle_jobs: list[UUID] = []
        self._asked: dict[UUID, float] = {}
        """Overdue workers, and when they were first asked for a heartbeat."""
        self._heartbeats_s: dict[UUID, float] = {}
        """Workers that were up when they were read, and the intervals of their heartbeats."""
        self._workers_read_at = float("-inf")
        self._pending_work: PendingWork | None = None

    def begin_term(self, lease: Lease) -> Sequence[LeaderStep]:
        self._elected_at = self._clock.monotonic()
        self._workers_read_at = float("-inf")
        self._orphans_until = self._elected_at + 2 * ALLOCATION_CHECK_INTERVAL_S
        self._draining = {worker.id for worker in self.registry.workers.values() if worker.draining}
        return [
            LeaderStep("report_draining", TICK_INTERVAL_S, self._report_draining),
            LeaderStep("expire_silent_workers", TICK_INTERVAL_S, partial(self._expire_if_overdue, lease)),
            LeaderStep("requeue_recent_orphans", TICK_INTERVAL_S, self._requeue_recent_orphans),
            LeaderStep("broadcast_liveness", BROADCAST_INTERVAL_S, self._broadcast_liveness),
            LeaderStep("reconcile_allocations", ALLOCATION_CHECK_INTERVAL_S, self.reconcile_allocations),
            LeaderStep("requeue_orphans", ALLOCATION_CHECK_INTERVAL_S, self.requeue_orphans),
            LeaderStep("release_missed_dependents", ALLOCATION_CHECK_INTERVAL_S, self.release_missed_dependents),
            LeaderStep("end_overdue", TICK_INTERVAL_S, self._end_if_overdue),
            LeaderStep("reschedule_idle_jobs", RESCHEDULE_AFTER_S, self._reschedule_if_active),
            LeaderStep("mark_booked_jobs", RESCHEDULE_AFTER_S, self._mark_if_active),
        ]

    def on_step_failed(self, step: str, error: Exception) -> None:
        log.info("reconcile_deferred", step=step, reason=str(error))

    async def _expire_if_overdue(self, lease: Lease) -> None:
        if self._all_heard():
            self._asked.clear()
        else:
            await self.expire_silent_workers(lease)

    def _all_heard(self) -> bool:
        """Whether the workers that are up were read lately, and no heartbeat is overdue."""
        now, known = self._clock.monotonic(), self.registry.workers
        if now - self._workers_read_at >= WORKERS_READ_INTERVAL_S or not known.keys() <= self._heartbeats_s.keys():
            return False
        return all(
            (worker := known.get(each)) is not None
            and worker.confirmed
            and now - worker.last_heartbeat_at <= heartbeat_s + OVERDUE_MARGIN_S
            for each, heartbeat_s in self._heartbeats_s.items()
        )

    async def expire_silent_workers(self, lease: Lease) -> list[UUID]:
        """Declare workers lost whose heartbeats stopped; returns them."""
        began_at = self._clock.monotonic()
        rows = await self.database.rows(LIVE_WORKERS)
        self._heartbeats_s = {row["pk_host"]: row["heartbeat_s"] for row in rows}
        self._workers_read_at = began_at
        silent = [row for row in rows if self._is_silent(row["pk_host"], row["age_s"], row["heartbeat_s"])]
        await self._ask_overdue({row["pk_host"]: row["heartbeat_s"] for row in rows if row not in silent})
        if not silent:
            return []
        for row in silent:
            await self._end_worker(lease, row["pk_host"], row["str_name"], row["pool"])
        self._orphans_until = self._clock.monotonic() + 2 * ALLOCATION_CHECK_INTERVAL_S
        await self._broadcast_liveness()
        return [row["pk_host"] for row in silent]

    def _is_silent(self, worker: UUID, age_s: float, heartbeat_s: float) -> bool:
        """Judged by the heartbeat interval of its own session."""
        silent_s = silent_after_s(heartbeat_s)
        if not self._can_detect_silence(silent_s):
            return False
        known, now = self.registry.workers.get(worker), self._clock.monotonic()
        since = self.members.hears_itself_since or now
        if known is None or not known.confirmed or known.last_heartbeat_at < since:
            # Not heard since we listen: it may still be connecting again.
            return min(age_s, now - since) > max(FIRST_HEARTBEAT_TIMEOUT_S, silent_s)
        # It was asked for a heartbeat, and our own has made its way through NATS since then.
        asked_at = self._asked.get(worker, float("inf"))
        was_asked = known.last_heartbeat_at < asked_at < self.members.last_heard_itself
        return was_asked and now - known.last_heartbeat_at > silent_s

    async def _ask_overdue(self, heartbeat_s: Mapping[UUID, float]) -> None:
        """Ask workers for a heartbeat that is overdue: one lost message must not cost the frames of a worker."""
        now = self._clock.monotonic()
        overdue = {
            worker.id
            for worker in self.registry.workers.values()
            if now - worker.last_heartbeat_at > heartbeat_s.get(worker.id, float("inf")) + OVERDUE_MARGIN_S
        }
        self._asked = {worker: at for worker, at in self._asked.items() if worker in overdue}
        with suppress(NatsUnavailable):  # who was not asked is not judged
            for some in _batches(sorted(overdue), ASKED_AT_ONCE_MAX):
                await self.bus.publish_core(LIVENESS_SUBJECT, encode(WorkerLiveness(overdue=list(some))))
                self._asked = dict.fromkeys(some, now) | self._asked

    def _can_detect_silence(self, silent_s: float) -> bool:
        """Whether such a silence is evidence: we have led, and received our own heartbeats, for longer."""
        since = self.members.hears_itself_since
        if since is None or self.members.is_isolated():
            return False
        return self._clock.monotonic() - max(since, self._elected_at) > silent_s + 2 * TICK_INTERVAL_S

    async def _report_draining(self) -> None:
        draining = {worker.id: worker for worker in self.registry.workers.values() if worker.draining}
        for worker in draining.values():
            if worker.id not in self._draining:
                self._events.worker_changed("draining", worker.id, worker.name, worker.pool)
        self._draining = set(draining)

    async def _end_worker(self, lease: Lease, worker: UUID, name: str, pool: str) -> None:
        known = self.registry.workers.get(worker)
        state = "gone" if known is not None and known.draining and not known.held else "lost"
        async with self.database.transaction() as tx:
            await self.leases.guard(tx, lease)
            if not await tx.run(END_WORKER, worker, state):
                return
        self.registry.remove(worker, lost=True)
        self._events.worker_changed(state, worker, name, pool)
        if state == "lost":
            self._lost[worker] = self._clock.monotonic()
            LOST_WORKERS.inc()
            log.warning("worker_lost", worker=name)

    async def _requeue_recent_orphans(self) -> None:
        """Shortly after an election or the loss of a worker, look for orphans at every tick."""
        if self._clock.monotonic() < self._orphans_until:
            await self.requeue_orphans()

    async def requeue_orphans(self) -> int:
        """End the procs of ended workers, so that their frames are queued again. Returns the number of frames."""
        rescued = 0
        for _ in range(self._limits.max_iterations_per_tick):
            rows = await self.database.rows(ORPHANED_PROCS, BATCH)
            by_worker: dict[UUID | None, list[AttemptResult]] = defaultdict(list)
            cut = rows[-1]["carrier"] if len(rows) == BATCH and rows[-1]["carrier"] != rows[-1]["token"] else None
            for row in rows:
                # A series that is cut is left for the next batch: the rest of it would seem to have started.
                if cut is None or row["carrier"] != cut:
                    by_worker[row["pk_host"]].append(_lost_end(row["token"], unstarted=row["unstarted"]))
            if by_worker:
                self._on_completion(await self.finisher.finish_attempts(by_worker))
            rescued += len(rows)
            if len(rows) < BATCH:
                break
        return rescued

    async def _read_pending_work(self) -> PendingWork:
        """What one statement tells the steps of a tick."""
        now, known = self._clock.monotonic(), self._pending_work
        if known is None or now - known.read_at_s >= TICK_INTERVAL_S / 2:
            row = await self.database.row(PENDING_WORK)
            assert row is not None
            known = self._pending_work = PendingWork(row["overdue"], row["active"], now)
        return known

    async def _end_if_overdue(self) -> None:
        if (await self._read_pending_work()).overdue:
            await self.end_overdue()

    async def _reschedule_if_active(self) -> None:
        if (await self._read_pending_work()).active:
            await self.reschedule_idle_jobs()
        else:
            self._idle_jobs = []

    async def _mark_if_active(self) -> None:
        if (await self._read_pending_work()).active:
            await self.mark_booked_jobs()

    async def reschedule_idle_jobs(self) -> None:
        """Set jobs back to SCHEDULED that had no booked frame at the last call either: all their frames wait."""
        rows = await self.database.rows(RESCHEDULE, self._idle_jobs)
        changed = [JobStateChange(row["pk_job"], row["pk_show"], row["topic"]) for row in rows if row["topic"]]
        self._idle_jobs = list({row["pk_job"] for row in rows} - {change.job for change in changed})
        if changed:
            self._events.job_states_changed(JobState.SCHEDULED, changed)

    async def mark_booked_jobs(self) -> None:
        """Mark jobs as DISPATCHED whose server booked a frame and died before it wrote their state."""
        rows = await self.database.rows(MARK_BOOKED)
        if rows:
            changed = [JobStateChange(row["pk_job"], row["pk_show"], row["topic"]) for row in rows]
            self._events.job_states_changed(JobState.DISPATCHED, changed)

    async def release_missed_dependents(self) -> int:
        """Release jobs whose dependency ended while they were being submitted; returns how many."""
        return int(await self.database.value(RELEASE_MISSED_DEPENDENTS, BATCH))

    async def reconcile_allocations(self) -> None:
        """Check every proc: is it in its worker's heartbeat, has its job ended, is it past its time limit?"""
        # Heartbeats before the ack floor: reports that a heartbeat counts have then been handled, or the proc is
        # skipped.
        beats = {
            worker.id: HeartbeatSnapshot(worker.held, worker.reported, worker.last_heartbeat_at)
            for worker in self.registry.workers.values()
            if worker.confirmed
        }
        handled = await self.bus.ack_floor(report_consumer.CONSUMER_SPEC)
        strangers = [run for worker in self.registry.workers.values() for run in worker.unbooked]
        if strangers:
            await self.bus.publish_core(CANCEL_SUBJECT, encode(CancelFrames(strangers, "not booked")))
        after, stale = -1, set[UUID]()
        while True:
            rows = await self.database.rows(ALL_PROCS, after, PAGE_SIZE)
            now = self._clock.monotonic()
            unreported: dict[UUID, list[int]] = defaultdict(list)
            overdue: dict[UUID, list[int]] = defaultdict(list)
            stop: list[int] = []
            for row in rows:
                beat = beats.get(row["pk_host"])
                beat_after_s = row["age_s"] - (now - beat.received_at) if beat is not None else 0.0
                if beat is not None and beat_after_s > DELIVERY_S and not beat.holds(row["token"]):
                    if handled is None or beat.reported <= handled:
                        unreported[row["pk_host"]].append(row["token"])
                elif row["ended"]:
                    stop.append(row["token"])
                elif row["work"] is not None and row["age_s"] > self._running_timeout_s(row["work"]):
                    overdue[row["pk_host"]].append(row["token"])
                    stale.add(row["pk_job"])
            await self._requeue_unreported(unreported)
            await self._time_out(overdue)
            if stop:
                await self.bus.publish_core(CANCEL_SUBJECT, encode(CancelFrames(to_ranges(stop))))
            if len(rows) < PAGE_SIZE:
                STALE_JOBS.labels("RUNNING").set(len(stale))
                return
            after = rows[-1]["token"]

    def _running_timeout_s(self, work: bytes) -> float:
        return (_WORK.decode(work).timeout_s or self._limits.running_timeout) + GRACE_S

    async def _requeue_unreported(self, unreported: dict[UUID, list[int]]) -> None:
        for worker, tokens in unreported.items():
            UNREPORTED_FRAMES.inc(len(tokens))
            log.warning("frames_unreported", worker=str(worker), frames=len(tokens))
            for part in _batches(tokens, BATCH):
                ends = [
                    AttemptResult(token, AttemptStatus.REFUSED, code=Reason.DISPATCH_TIMEOUT.value) for token in part
                ]
                self._on_completion(await self.finisher.finish_attempts({worker: ends}))

    async def _time_out(self, overdue: dict[UUID, list[int]]) -> None:
        for worker, tokens in overdue.items():
            for part in _batches(tokens, BATCH):
                ends = [
                    AttemptResult(token, AttemptStatus.TIMEOUT, code=Reason.RUNNING_TIMEOUT.value) for token in part
                ]
                self._on_completion(await self.finisher.finish_attempts({worker: ends}))
            await self.bus.publish_core(
                CANCEL_SUBJECT, encode(CancelFrames(to_ranges(tokens), Reason.RUNNING_TIMEOUT.value))
            )

    async def end_overdue(self) -> None:
        """End jobs past their deadline or max_wait, and continue terminations that were interrupted."""
        now, batch = self._clock.monotonic(), self._limits.batch_size
        self._skipped_until = {job: until for job, until in self._skipped_until.items() if now < until}
        for _ in range(self._limits.max_iterations_per_tick):
            rows = await self.database.rows(OVERDUE_JOBS, batch, list(self._skipped_until))
            for row in rows:
                job, state = JobId(row["pk_job"]), JobState(row["ends_as"])
                await self._try_to_end(job, partial(self.canceller.terminate, job, state, row["reason"]))
            if not rows:
                break
        after = UUID(int=0)
        for _ in range(self._limits.max_iterations_per_tick):
            rows = await self.database.rows(ENDING_JOBS, batch, list(self._skipped_until), after)
            for row in rows:
                await self._try_to_end(row["pk_job"], partial(self.canceller.continue_termination, row["pk_job"]))
            if len(rows) < batch:
                break
            after = rows[-1]["pk_job"]

    async def _try_to_end(self, job: UUID, end: Callable[[], Awaitable[object]]) -> None:
        for retries_left in reversed(range(1 + self._limits.max_retries_per_job)):
            try:
                await end()
            except Exception as error:
                if is_outage(error):
                    raise
                # Any other failure, such as a lock, concerns this job only; the pass goes on with the others.
                if not retries_left:
                    self._skipped_until[job] = self._clock.monotonic() + self._limits.poll_interval
                    log.exception("job_termination_failed", job=str(job), rest_s=self._limits.poll_interval)
            else:
                return

    async def _broadcast_liveness(self) -> None:
        now = self._clock.monotonic()
        self._lost = {worker: at for worker, at in self._lost.items() if now - at < LOST_BROADCAST_S}
        alive = [
            worker.id
            for worker in self.registry.workers.values()
            if now - worker.last_heartbeat_at < worker.silent_after_s
        ]
        unknown = {row["pk_host"] for row in await self.database.rows(ENDED_WORKERS, alive)} if alive else set()
        lost = {*self._lost, *unknown, *self.registry.take_lost_heard()}
        liveness = WorkerLiveness([worker for worker in alive if worker not in unknown], sorted(lost))
        await self.bus.publish_core(LIVENESS_SUBJECT, encode(liveness))


def _lost_end(token: int, *, unstarted: bool) -> AttemptResult:
    """The end of a frame whose worker was lost, perhaps by one before it in its series."""
    if unstarted:
        return AttemptResult(token, AttemptStatus.REFUSED, code=AttemptCode.SERIES_LOST)
    return AttemptResult(token, AttemptStatus.FAILED, code=WORKER_LOST, error="The worker stopped responding.")


def _batches(items: Sequence[T], most: int) -> list[Sequence[T]]:
    return [items[at : at + most] for at in range(0, len(items), most)]
