"""Assigns a claimed batch to workers: load the layers, book, return refused frames, publish the assignments.

`rota.engine.dispatch.dispatcher` lists the crash cases between these steps.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID

import msgspec
import structlog

from rota.accounting.ledger import BookingBatch, BookingOutcome, DeclineReason
from rota.engine.backends import Backends
from rota.engine.completion.finisher import Finisher
from rota.engine.dispatch.booking_requests import (
    BookedSlice,
    LayerExecution,
    PartRequests,
    booked_slices,
    booking_requests,
    frames_with,
    job_of,
    series_limit,
    series_requests,
    split_by_size,
)
from rota.engine.dispatch.concurrency_limits import ConcurrencyLimiter
from rota.engine.dispatch.parked_jobs import ParkedJobs
from rota.engine.dispatch.pending_queues import BookingMoment, PendingQueue, PendingQueues
from rota.engine.dispatch.rounds import Round, RoundPart
from rota.engine.dispatch.series import (
    ALONE,
    SERIES_BYTES_MAX,
    SeriesLength,
    WorkDurations,
    slots_to_use,
    timing_key_of,
)
from rota.engine.dispatch.series_recall import SeriesRecall
from rota.engine.dispatch.state_writer import JobStateWriter
from rota.engine.tracing import JobTracer, TracedDispatch, end_spans, now_ns
from rota.infra import failpoints
from rota.infra.blob_store import BlobLocation
from rota.infra.clock import Clock
from rota.infra.nats import BusMessage
from rota.infra.postgres import Record, query
from rota.infra.telemetry import metrics, tracing
from rota.model.attempt_codes import AttemptCode
from rota.model.backoff import Backoff
from rota.model.error_reactions import is_outage
from rota.model.errors import (
    BlobCorrupted,
    BlobMissing,
    NatsUnavailable,
    PostgresUnavailable,
    RedisUnavailable,
    SetupFailed,
)
from rota.model.ids import JobId, LayerId, ShowId
from rota.model.jobs.work import Work
from rota.model.policy.constraints import apply_constraints
from rota.model.policy.decision import PolicyDecision
from rota.model.protocol import JOBS_SUBJECT, AssignedRange, Assignment, AttemptResult, AttemptStatus, encode
from rota.model.quota import Level, Refusal, Resource
from rota.model.reasons import Reason
from rota.model.token_ranges import TokenRange, to_ranges
from rota.placement import WorkerRegistry
from rota.policy.decision_store import DecisionStore
from rota.queue import Claim, FrameFailure
from rota.queue.claims import ClaimedRange

if TYPE_CHECKING:
    from opentelemetry.trace import Span

log = structlog.get_logger(__name__)

LAYERS = query(__package__, "layers_to_run")

CACHE_MAX: Final = 10_000
BOOKING_BACKOFF: Final = Backoff(0.05, 2.0)
SERIES_FULL: Final = "series_full"
"""Frames for which there was no slot, because those before them take longer than expected."""

DISPATCHED = metrics.counter("rota_jobs_dispatched", "Frames assigned to workers.", labels=("topic",))
REFUSALS = metrics.counter(
    "rota_dispatch_refusals", "Claimed frames returned to the queue, by reason.", labels=("reason",)
)

_WORK = msgspec.msgpack.Decoder(Work)
_ENCODE = msgspec.msgpack.Encoder(order="deterministic").encode
_DECLINE_REASONS: Final = {
    DeclineReason.NO_SUBSCRIPTION: Reason.QUOTA_SUBSCRIPTION,
    DeclineReason.UNKNOWN_FOLDER: Reason.QUOTA_FOLDER,
    DeclineReason.UNKNOWN_DEPT: Reason.QUOTA_POINT,
}
"""Declines that last until an operator changes the configuration; all others are transient."""
_SHOW_DECLINES: Final = frozenset(
    {
        DeclineReason.UNSEEDED,
        DeclineReason.REDIS_OFF,
        DeclineReason.NOT_MANAGED,
        DeclineReason.MANAGED,
        DeclineReason.UNKNOWN_SHOW,
    }
)
"""Declines of every frame of the show. A lock may be in one folder only, and `LockedShows` sees to the others."""


class PartBooking:
    """What is booked for one part of a round, and what came of it."""

    __slots__ = ("asked", "left_over", "outcomes", "part", "requests")

    def __init__(self, part: RoundPart, requests: PartRequests, asked: BookingMoment) -> None:
        self.part = part
        self.requests = requests.requests
        self.left_over = requests.left_over
        self.asked = asked
        self.outcomes: list[BookingOutcome] = []


class DispatchState(NamedTuple):
    """What a dispatcher keeps in memory between rounds."""

    pending_queues: PendingQueues
    parked_jobs: ParkedJobs
    concurrency_limiter: ConcurrencyLimiter
    state_writer: JobStateWriter
    durations: WorkDurations
    series_recall: SeriesRecall


class Assigner:
    def __init__(
        self, backends: Backends, registry: WorkerRegistry, finisher: Finisher, state: DispatchState, clock: Clock
    ) -> None:
        self.database = backends.database
        self.queue = backends.queue
        self.accounting = backends.accounting
        self.bus = backends.bus
        self.store = backends.store
        self.registry = registry
        self.finisher = finisher
        self.pending_queues = state.pending_queues
        self.parked_jobs = state.parked_jobs
        self.concurrency_limiter = state.concurrency_limiter
        self.state_writer = state.state_writer
        self.durations = state.durations
        self.series_recall = state.series_recall
        self.clock = clock
        self.traces = JobTracer(self.database)
        self.decision_store = DecisionStore(self.database)
        self._layers: dict[LayerId, LayerExecution] = {}
        self._works: dict[bytes, Work] = {}
        self._timing_keys: dict[bytes, int] = {}

    async def assign(self, planned: Round, claims: Mapping[RoundPart, Sequence[Claim]]) -> None:
        """Book the claimed frames and send them to their workers; the reservations end with their allocation."""
        failpoints.hit("dispatch.after_claim")
        since_ns = now_ns()
        claimed = {part: [each for claim in claims[part] for each in claim.ranges()] for part in planned.parts}
        executions = await self._layer_executions({each.layer for ranges in claimed.values() for each in ranges})
        await self._discard_ended([each for ranges in claimed.values() for each in ranges], executions)
        live = {
            part: [each for each in ranges if (found := executions.get(each.layer)) and found.ends_as is None]
            for part, ranges in claimed.items()
        }
        if any(executions[each.layer].jobs_max for ranges in live.values() for each in ranges):
            self.concurrency_limiter.add_limited(planned.show)
        if planned.show in self.concurrency_limiter.limited:
            live = await self._admit_jobs(planned.show, live)
        bookings = [
            PartBooking(part, self._requests(part, ranges, executions), self.pending_queues.moment(part.pending))
            for part, ranges in live.items()
        ]
        groups = [request.asked for booking in bookings for request in booking.requests]
        try:
            outcomes = iter(await self._book(planned.show, groups))
        except asyncio.CancelledError:
            # Redis may count tokens that PostgreSQL has barred meanwhile, and this process would not learn of it.
            self.accounting.add_unknown_commit([token for group in groups for token in group.tokens])
            raise
        for booking in bookings:
            booking.outcomes = list(islice(outcomes, len(booking.requests)))
            self._settle_share(booking)
        by_worker: dict[UUID, list[BookedSlice]] = defaultdict(list)
        for booking in bookings:
            self._allocate(booking, by_worker)
        if by_worker:
            await self._publish(by_worker, since_ns)
        await self._return_refused(bookings)
        for booking in bookings:
            self.pending_queues.shrink_share(booking.part.pending, booking.part.share, 0)

    def _requests(
        self, part: RoundPart, claimed: Sequence[ClaimedRange], executions: dict[LayerId, LayerExecution]
    ) -> PartRequests:
        lengths = self._series_lengths(claimed, executions) if part.runs_series else [ALONE] * len(claimed)
        if lengths:
            part.pending.series_length = reduce(SeriesLength.shortest, {*lengths})
        allowed = self.parked_jobs.slots_of({each.job for each in claimed}) if part.runs_series else None
        slots = part.plan.planned if allowed is None else min(part.plan.planned, allowed)
        frames = [len(each.tokens) for each in claimed]
        used = slots_to_use(slots, zip(frames, lengths, strict=True))
        if sum(frames) <= used:
            return booking_requests(part, claimed, executions)
        longest, is_limited = part.series_length.frames_max, part.pending.key.show in self.concurrency_limiter.limited
        limits = [
            series_limit(each, executions[each.layer], length, longest, alike=not is_limited)
            for each, length in zip(claimed, lengths, strict=True)
        ]
        return series_requests(part, claimed, executions, limits, used)

    def _series_lengths(
        self, claimed: Sequence[ClaimedRange], executions: dict[LayerId, LayerExecution]
    ) -> list[SeriesLength]:
        """A retry runs alone: the frame that ends its worker is found by its losses. So do frames that must not run
        again when their worker is lost: it is not known which of a series had started."""
        by_work: dict[bytes, SeriesLength] = {}
        lengths: list[SeriesLength] = []
        for each in claimed:
            execution = executions[each.layer]
            length = by_work.get(execution.work)
            if length is None:
                reruns = self.finisher.reruns_lost(self._decode_work(execution.work))
                length = self.durations.series_length(self._timing_key(execution.work)) if reruns else ALONE
                by_work[execution.work] = length
            if each.attempt > 1 or not execution.may_rerun:
                length = ALONE
            elif size := len(each.payload or execution.input or b""):
                length = length.at_most(SERIES_BYTES_MAX // size)
            lengths.append(length)
        return lengths

    def _timing_key(self, work: bytes) -> int:
        key = self._timing_keys.get(work)
        if key is None:
            if len(self._timing_keys) >= CACHE_MAX:
                self._timing_keys.clear()
            key = self._timing_keys[work] = timing_key_of(work)
        return key

    async def _admit_jobs(
        self, show: ShowId, claimed: Mapping[RoundPart, Sequence[ClaimedRange]]
    ) -> dict[RoundPart, list[ClaimedRange]]:
        """Park the frames of jobs above the show's limit on concurrent jobs."""
        jobs = [each.job for ranges in claimed.values() for each in ranges]
        admitted = await self.concurrency_limiter.admit(show, jobs)
        over_limit: dict[tuple[RoundPart, JobId], list[int]] = defaultdict(list)
        for part, ranges in claimed.items():
            for each in ranges:
                if each.job not in admitted:
                    over_limit[part, each.job] += each.tokens
        if over_limit:
            REFUSALS.labels(Reason.TENANT_LIMIT.value).inc(sum(map(len, over_limit.values())))
            async with self.database.transaction() as tx:
                for (part, job), tokens in over_limit.items():
                    await self.queue.park(tokens, job, rest_of=part.pending.lanes, on=tx)
        return {part: [each for each in ranges if each.job in admitted] for part, ranges in claimed.items()}

    async def _layer_executions(self, layers: set[LayerId]) -> dict[LayerId, LayerExecution]:
        found = {layer: cached for layer in layers if (cached := self._layers.get(layer)) is not None}
        missing = [layer for layer in layers if layer not in found]
        if missing:
            rows = await self.database.rows(LAYERS, missing)
            decisions = await self.decision_store.read({row["word"] for row in rows})
            for row in rows:
                ready = self._with_constraints(_layer_execution(row), decisions.get(row["word"]))
                runnable = found[LayerId(row["pk_layer"])] = await self._with_input(ready)
                if row["frames"] > 1:
                    self._cache_layer(row["pk_layer"], runnable)
        return found

    def _with_constraints(self, runnable: LayerExecution, decision: PolicyDecision | None) -> LayerExecution:
        """Apply the constraints of the policy decision that admitted the job."""
        if decision is None or decision.constraints is None:
            return runnable
        work = _ENCODE(apply_constraints(self._decode_work(runnable.work), decision.constraints))
        budgets = decision.constraints.budgets
        return msgspec.structs.replace(
            runnable, work=work, jobs_max=budgets.max_concurrent_jobs, may_rerun=budgets.max_retries != 0
        )

    async def _with_input(self, runnable: LayerExecution) -> LayerExecution:
        """Workers cannot read PostgreSQL, so inputs stored there are sent along."""
        if runnable.pointer is None or not runnable.pointer.startswith(BlobLocation.POSTGRES.value):
            return runnable
        try:
            data = await self.store.get(runnable.pointer)
        except (BlobMissing, BlobCorrupted, SetupFailed) as error:
            log.warning("input_missing", pointer=runnable.pointer, reason=error.sentence)
            return runnable  # the worker reports the missing input and the frame fails
        return msgspec.structs.replace(runnable, input=data, pointer=None)

    def _cache_layer(self, layer: LayerId, runnable: LayerExecution) -> None:
        """Cache a layer of many frames. `ends_as` may go stale: the canceller finds frames booked since then."""
        if len(self._layers) >= CACHE_MAX:
            self._layers.clear()
        self._layers[layer] = runnable

    async def _book(self, show: ShowId, groups: BookingBatch) -> list[BookingOutcome]:
        """Retry until accounting answers: booking is idempotent by token, so a retry also recovers a lost reply.

        What is not booked in the end is given back. So no attempt may book it later: see `confirm_unbooked`.
        """
        if not groups:
            return []
        streak, in_doubt = 0, False
        while True:
            try:
                outcomes, failed_as = await self._try_to_book(show, groups, give_up=not in_doubt)
                if failed_as is None and not in_doubt:
                    return outcomes
                in_doubt |= failed_as is DeclineReason.REDIS_OFF
                return await self.accounting.confirm_unbooked(show, groups, outcomes, in_doubt=in_doubt)
            except PostgresUnavailable as error:
                in_doubt |= error.facts.get("outcome", "unknown") == "unknown" and is_outage(error)
                streak += 1
                log.warning("booking_outcome_unknown", reason=error.sentence)
                await self.clock.sleep(BOOKING_BACKOFF.pause_s(streak, 0.5))

    async def _try_to_book(
        self, show: ShowId, groups: BookingBatch, *, give_up: bool
    ) -> tuple[list[BookingOutcome], DeclineReason | None]:
        """The outcomes, and why the call failed for this show alone, so that no other show waits for it."""
        try:
            with self.accounting.locked_shows.attempt(show):
                return await self.accounting.book(show, groups), None
        except RedisUnavailable:
            log.warning("accounting_unavailable", show=str(show))
            failed_as = DeclineReason.REDIS_OFF
        except PostgresUnavailable as error:
            if is_outage(error) or not give_up:
                raise
            failed_as = DeclineReason.LOCKED
        return _declined(groups, failed_as), failed_as

    def _allocate(self, booking: PartBooking, by_worker: dict[UUID, list[BookedSlice]]) -> None:
        """Replace the reservation by the frames that were booked, by worker, in one step: none counts twice."""
        tokens: dict[UUID, list[int]] = defaultdict(list)
        series: dict[UUID, dict[int, list[TokenRange]]] = defaultdict(lambda: defaultdict(list))
        capped: set[int] = set()
        frames = slots = 0
        for request, outcome in zip(booking.requests, booking.outcomes, strict=True):
            slots += len(outcome.booked) + len(outcome.already)
            for part, booked in booked_slices(request, outcome):
                by_worker[part.worker].append((part, booked))
                frames += len(booked)
                if part.series:
                    series[part.worker][part.series] += to_ranges(booked)
                    if self.parked_jobs.slots_of((part.claimed_range.job,)) is not None:
                        capped.add(part.series)
                else:
                    tokens[part.worker] += booked
        cls = booking.part.pending.key.cls
        for worker in {**tokens, **series}:
            in_series = series[worker].values() if worker in series else ()
            self.registry.record_allocations(worker, to_ranges(tokens[worker]), cls.need, series=in_series)
            for is_capped in (False, True):
                spans = [
                    (each[0][0], carrier + 1 - each[0][0])
                    for carrier, each in series.get(worker, {}).items()
                    if (carrier in capped) == is_capped
                ]
                if spans:
                    self.series_recall.add(booking.part.pending, worker, spans, capped=is_capped)
        self.registry.unreserve(booking.part.reservation, allocated=slots)
        if frames:
            DISPATCHED.labels(cls.topic).inc(frames)

    async def _publish(self, by_worker: Mapping[UUID, list[BookedSlice]], since_ns: int) -> None:
        failpoints.hit("dispatch.before_publish")
        spans = await self._start_spans(by_worker, since_ns) if tracing.is_enabled() else []
        messages = [
            (worker, part, self._message(worker, part))
            for worker, slices in by_worker.items()
            for part in split_by_size(slices)
        ]
        self.state_writer.record_dispatched(
            {part.claimed_range.job for part, _ in (each for slices in by_worker.values() for each in slices)}
        )
        await self._send(messages)
        end_spans(spans)

    async def _start_spans(self, by_worker: Mapping[UUID, Sequence[BookedSlice]], since_ns: int) -> list[Span | None]:
        """Start spans for the traced assignments and put their trace context into the slices."""
        parts = [(part, worker, len(booked)) for worker, slices in by_worker.items() for part, booked in slices]
        spans = await self.traces.begin_dispatches(
            [
                TracedDispatch(part.claimed_range.job, part.claimed_range.layer, worker, part.claimed_range.attempt, n)
                for part, worker, n in parts
            ],
            since_ns,
        )
        for (part, _, _), span in zip(parts, spans, strict=True):
            part.trace = tracing.traceparent(span) if span is not None else ""
        return spans

    async def _send(self, messages: Sequence[tuple[UUID, Sequence[BookedSlice], BusMessage]]) -> None:
        try:
            receipts = await self.bus.publish_many([message for _, _, message in messages])
        except NatsUnavailable:
            receipts = []
        failpoints.after_send("dispatch.publish")
        for at, (worker, slices, _) in enumerate(messages):
            if at >= len(receipts) or not receipts[at].settled:
                await self._return_unsent(worker, [token for _, booked in slices for token in booked])

    async def _return_unsent(self, worker: UUID, tokens: Sequence[int]) -> None:
        """Booked but not sent: counts as one failed dispatch."""
        REFUSALS.labels(AttemptCode.PUBLISH_FAILED).inc(len(tokens))
        ends = [AttemptResult(token, AttemptStatus.REFUSED, code=AttemptCode.PUBLISH_FAILED) for token in tokens]
        result = await self.finisher.finish_attempts({worker: ends})
        self.registry.release_allocations(worker, result.freed.get(worker, ()))
        for show, deleted in result.released.items():
            self.pending_queues.bookings_released(show, deleted.batch)
            self.pending_queues.capacity_released(show, deleted.frames, deleted.by_pool())

    def _message(self, worker: UUID, slices: Sequence[BookedSlice]) -> BusMessage:
        works: dict[bytes, int] = {}
        portions: list[AssignedRange] = []
        for part, booked in slices:
            claimed_range, runnable = part.claimed_range, part.runnable
            place = works.setdefault(runnable.work, len(works))
            offset = claimed_range.frames.start - claimed_range.tokens.start - runnable.first_frame
            for token, n in to_ranges(booked):
                portions.append(
                    AssignedRange(
                        token,
                        n,
                        claimed_range.job,
                        claimed_range.layer,
                        runnable.first_frame + (offset + token) * runnable.step,
                        claimed_range.attempt,
                        place,
                        claimed_range.payload if claimed_range.payload is not None else runnable.input,
                        runnable.pointer,
                        runnable.step,
                        part.trace,
                        part.series,
                    )
                )
        assignment = Assignment([*map(self._decode_work, works)], portions, [*map(self._timing_key, works)])
        data = encode(assignment)
        return BusMessage(subject=JOBS_SUBJECT.format(worker), data=data, msg_id=f"assign:{portions[0].token}:{worker}")

    def _decode_work(self, packed: bytes) -> Work:
        work = self._works.get(packed)
        if work is None:
            if len(self._works) >= CACHE_MAX:
                self._works.clear()
            work = self._works[packed] = _WORK.decode(packed)
        return work

    async def _return_refused(self, bookings: Sequence[PartBooking]) -> None:
        """Return frames that were not booked and back off, so that they are not tried again immediately."""
        back: dict[PendingQueue, list[int]] = {}
        for booking in bookings:
            pending = booking.part.pending
            refused, parked = self._sort_refused(booking)
            refused += booking.left_over
            for job, tokens in parked.items():
                REFUSALS.labels(Reason.QUOTA_JOB.value).inc(len(tokens))
                await self.queue.park(tokens, job, rest_of=pending.lanes)
                self.parked_jobs.add(job, pending.series_length.frames_max)
            if refused:
                reason = pending.reason.value if pending.reason else "quota"
                REFUSALS.labels(SERIES_FULL if len(refused) == len(booking.left_over) else reason).inc(len(refused))
                back[pending] = refused
            elif booking.outcomes:
                self.pending_queues.mark_accepted(pending)
        if back:
            await self.queue.give_back([token for tokens in back.values() for token in tokens])
        for pending, tokens in back.items():
            self.pending_queues.frames_returned(pending, len(tokens))

    def _sort_refused(self, booking: PartBooking) -> tuple[list[int], dict[JobId, list[int]]]:
        """Tokens to give back, and those to park by job."""
        back: list[int] = []
        parked: dict[JobId, list[int]] = defaultdict(list)
        for request, outcome in zip(booking.requests, booking.outcomes, strict=True):
            if outcome.refused and outcome.refusal is not None:
                refused = frames_with(request, outcome.refused)
                if outcome.refusal.table in (Level.JOB, Level.LAYER):
                    parked[request.asked.charge.job] += refused
                else:
                    back += refused
                    self.accounting.limit_refused(booking.part.pending.key.show)
                    self._back_off(booking, Reason.of_level(outcome.refusal.table))
            for token, why in outcome.declined.items():
                followers = [each for each in frames_with(request, [token]) if each != token]
                back += (each for each in followers if each not in outcome.declined)
                if why is DeclineReason.CAPPED:
                    parked[job_of(request, token)].append(token)
                    continue
                back.append(token)
                reason = _DECLINE_REASONS.get(why, Reason.BOOKS_UNAVAILABLE)
                self._back_off(booking, reason, whole_show=why in _SHOW_DECLINES)
        return back, parked

    def _back_off(self, booking: PartBooking, reason: Reason, *, whole_show: bool = False) -> None:
        if reason is not Reason.QUOTA_SUBSCRIPTION:  # the room of the share says what the queue may try
            self.pending_queues.mark_refused(booking.part.pending, reason, booking.asked, whole_show=whole_show)

    def _settle_share(self, booking: PartBooking) -> None:
        """Take what accounting granted from the rooms of the shares. The reservation remains for the other frames until
        they are back in their queue: it must not seem to be empty to what is released meanwhile."""
        pending, asked = booking.part.pending, booking.asked
        refused = sum(len(outcome.refused) + len(outcome.declined) for outcome in booking.outcomes)
        self.pending_queues.shrink_share(pending, booking.part.share, refused)
        for request, outcome in zip(booking.requests, booking.outcomes, strict=True):
            pool, ask = request.asked.charge.alloc, request.asked.charge.ask
            granted = len(outcome.booked) + len(outcome.already)
            if granted:
                self.pending_queues.frames_booked(pending, pool, granted, asked)
            refusal = outcome.refusal
            if DeclineReason.NO_SUBSCRIPTION in outcome.declined.values():
                resource = Resource.CORES if ask.cores else Resource.GPUS
                refusal = Refusal(Level.SUBSCRIPTION, resource, 0, 0, ask.of(resource))
            if refusal is not None and refusal.table is Level.SUBSCRIPTION:
                self.pending_queues.share_refused(pending, pool, refusal, asked, booking.part.share)

    async def _discard_ended(self, claimed: Sequence[ClaimedRange], executions: dict[LayerId, LayerExecution]) -> None:
        """Park frames of a job that is being terminated, for the canceller to end; fail frames whose job is gone."""
        for claimed_range in claimed:
            execution = executions.get(claimed_range.layer)
            if execution is not None and execution.ends_as is None:
                continue
            if execution is not None:
                await self.queue.park(claimed_range.tokens, claimed_range.job)
            else:
                error = "Its job has ended: submit it again, linked to the old one."
                await self.queue.fail(
                    [FrameFailure(token, AttemptCode.JOB_ENDED, error) for token in claimed_range.tokens]
                )


def _declined(groups: BookingBatch, why: DeclineReason) -> list[BookingOutcome]:
    return [BookingOutcome(declined=dict.fromkeys(group.tokens, why)) for group in groups]


def _layer_execution(row: Record) -> LayerExecution:
    return LayerExecution(
        row["work"],
        row["input"],
        row["input_at"],
        row["capped"],
        row["ends_as"],
        row["first_frame"],
        row["frame_step"],
        single=row["frames"] == row["int_layers"] == 1,
    )
