"""Handing a claimed batch to workers: read what it runs, book it, give back what was refused, publish the rest.

`rota.engine.dispatch.dispatcher` says what happens when we die between two of these steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final
from uuid import UUID

import msgspec
import structlog

from rota.accounting.ledger import (
    NIL_UUID,
    BookingBatch,
    BookingGroup,
    BookingOutcome,
    Charge,
    DeclineReason,
    SingleFrameBatch,
)
from rota.accounting.service import AccountingService
from rota.engine.completion.finisher import Finisher
from rota.engine.dispatch.concurrency_limits import ConcurrencyLimiter
from rota.engine.dispatch.parked_jobs import ParkedJobs
from rota.engine.dispatch.pending_queues import PendingQueue, PendingQueues
from rota.engine.dispatch.state_writer import JobStateWriter
from rota.engine.tracing import JobTracer, TracedDispatch, end_spans, now_ns
from rota.infra import failpoints
from rota.infra.blob_store import BlobLocation, BlobStore
from rota.infra.clock import Clock
from rota.infra.nats import Bus, BusMessage
from rota.infra.postgres import Database, Record, query
from rota.infra.telemetry import metrics, tracing
from rota.model.backoff import Backoff
from rota.model.errors import (
    BlobCorrupted,
    BlobMissing,
    NatsUnavailable,
    PostgresUnavailable,
    RedisUnavailable,
    SetupFailed,
)
from rota.model.ids import JobId, LayerId, PoolId
from rota.model.jobs.work import Work
from rota.model.policy.constraints import apply_constraints
from rota.model.policy.decision import PolicyDecision
from rota.model.protocol import JOBS_SUBJECT, AssignedRange, Assignment, AttemptResult, AttemptStatus, encode, to_ranges
from rota.model.quota import Level
from rota.model.reasons import Reason
from rota.model.units import Centicores
from rota.placement import PlacementPlan, WorkerRegistry
from rota.policy.decision_store import DecisionStore
from rota.queue import Claim, FrameFailure, Queue
from rota.queue.claims import ClaimedRange

if TYPE_CHECKING:
    from opentelemetry.trace import Span

log = structlog.get_logger(__name__)

LAYERS = query(__package__, "layers_to_run")

CACHE_MAX: Final = 10_000
MESSAGE_BYTES_MAX: Final = 400_000
"""Inputs that travel in one message; NATS takes a megabyte, and an input has at most half of that."""
BOOKING_BACKOFF: Final = Backoff(0.05, 2.0)

DISPATCHED = metrics.counter("rota_jobs_dispatched", "Frames handed to workers.", labels=("topic",))
REFUSALS = metrics.counter(
    "rota_dispatch_refusals", "Frames that went back to their place, by why.", labels=("reason",)
)

_WORK = msgspec.msgpack.Decoder(Work)
_ENCODE = msgspec.msgpack.Encoder(order="deterministic").encode
_DECLINE_REASONS: Final = {
    DeclineReason.NO_SUBSCRIPTION: Reason.QUOTA_SUBSCRIPTION,
    DeclineReason.UNKNOWN_FOLDER: Reason.QUOTA_FOLDER,
    DeclineReason.UNKNOWN_DEPT: Reason.QUOTA_POINT,
}
"""Nothing is set up where it would be counted; everything else passes by itself."""


class LayerExecution(msgspec.Struct, frozen=True):
    """What the frames of a layer run."""

    work: bytes
    input: bytes | None
    pointer: str | None
    capped: bool
    ends_as: str | None
    first_frame: int
    step: int
    jobs_max: int = 0
    """Of its show at a time, by the policy that let it in; 0: as many as there are."""


class WorkerSlice(msgspec.Struct):
    """Frames of a piece that go to one worker."""

    piece: ClaimedRange
    worker: UUID
    tokens: range
    runnable: LayerExecution
    trace: str = ""


class BookingRequest(msgspec.Struct):
    """Parts that are booked as one, in the order of their tokens."""

    parts: list[WorkerSlice]
    asked: BookingGroup | SingleFrameBatch


BookedSlice = tuple[WorkerSlice, Sequence[int]]
"""A part, and those of its tokens that were booked."""


class Assigner:
    def __init__(
        self,
        database: Database,
        queue: Queue,
        books: AccountingService,
        bus: Bus,
        registry: WorkerRegistry,
        finisher: Finisher,
        store: BlobStore,
        board: PendingQueues,
        marks: JobStateWriter,
        parking: ParkedJobs,
        tenants: ConcurrencyLimiter,
        clock: Clock,
    ) -> None:
        self.database = database
        self.queue = queue
        self.books = books
        self.bus = bus
        self.registry = registry
        self.finisher = finisher
        self.store = store
        self.board = board
        self.marks = marks
        self.parking = parking
        self.tenants = tenants
        self.clock = clock
        self.traces = JobTracer(database)
        self.words = DecisionStore(database)
        self._layers: dict[LayerId, LayerExecution] = {}
        self._works: dict[bytes, Work] = {}

    async def assign(self, spot: PendingQueue, plan: PlacementPlan, claims: Sequence[Claim]) -> None:
        failpoints.hit("dispatch.after_claim")
        since_ns = now_ns()
        pieces = [piece for claim in claims for piece in claim.ranges()]
        runnables = await self._layer_executions({piece.layer for piece in pieces})
        live = [piece for piece in pieces if (known := runnables.get(piece.layer)) and known.ends_as is None]
        if len(live) < len(pieces):
            await self._discard_ended([piece for piece in pieces if piece not in live], runnables)
        if any(runnables[piece.layer].jobs_max for piece in live):
            self.tenants.add_limited(spot.key.show)
        if spot.key.show in self.tenants.limited:
            live = await self._admit_jobs(spot, live)
        parts = _slice_by_worker(live, plan, runnables)
        pools = {portion.worker: portion.pool_id for portion in plan.portions}
        bundles = _booking_requests(spot, parts, pools)
        outcomes = await self._book(spot, [bundle.asked for bundle in bundles])
        await self._return_refused(spot, bundles, outcomes)
        await self._publish(spot, bundles, outcomes, pools, since_ns)

    async def _admit_jobs(self, spot: PendingQueue, pieces: Sequence[ClaimedRange]) -> list[ClaimedRange]:
        """Put aside what belongs to more jobs than the show may run at once."""
        let_in = await self.tenants.admit(spot.key.show, [piece.job for piece in pieces])
        outside: dict[JobId, list[int]] = defaultdict(list)
        for piece in pieces:
            if piece.job not in let_in:
                outside[piece.job] += piece.tokens
        if outside:
            REFUSALS.labels(Reason.TENANT_LIMIT.value).inc(sum(map(len, outside.values())))
            async with self.database.transaction() as tx:
                for job, tokens in outside.items():
                    await self.queue.park(tokens, job, rest_of=spot.lanes, on=tx)
        return [piece for piece in pieces if piece.job in let_in]

    async def _layer_executions(self, layers: set[LayerId]) -> dict[LayerId, LayerExecution]:
        found = {layer: known for layer in layers if (known := self._layers.get(layer)) is not None}
        missing = [layer for layer in layers if layer not in found]
        if missing:
            rows = await self.database.rows(LAYERS, missing)
            words = await self.words.read({row["word"] for row in rows})
            for row in rows:
                ready = self._with_constraints(_layer_execution(row), words.get(row["word"]))
                runnable = found[LayerId(row["pk_layer"])] = await self._with_input(ready)
                if row["frames"] > 1:
                    self._cache_layer(row["pk_layer"], runnable)
        return found

    def _with_constraints(self, runnable: LayerExecution, word: PolicyDecision | None) -> LayerExecution:
        """Under the constraints of the word by which its job was let in."""
        if word is None or word.constraints is None:
            return runnable
        work = _ENCODE(apply_constraints(self._decode_work(runnable.work), word.constraints))
        return msgspec.structs.replace(runnable, work=work, jobs_max=word.constraints.budgets.max_concurrent_jobs)

    async def _with_input(self, runnable: LayerExecution) -> LayerExecution:
        """A worker cannot read PostgreSQL, so what lies there travels."""
        if runnable.pointer is None or not runnable.pointer.startswith(BlobLocation.POSTGRES.value):
            return runnable
        try:
            data = await self.store.get(runnable.pointer)
        except (BlobMissing, BlobCorrupted, SetupFailed) as gone:
            log.warning("input_missing", pointer=runnable.pointer, reason=gone.sentence)
            return runnable  # its worker says so, and the frame fails
        return msgspec.structs.replace(runnable, input=data, pointer=None)

    def _cache_layer(self, layer: LayerId, runnable: LayerExecution) -> None:
        """Of a layer of many frames: that its job is being ended since is seen by whoever ends it."""
        if len(self._layers) >= CACHE_MAX:
            self._layers.clear()
        self._layers[layer] = runnable

    async def _book(self, spot: PendingQueue, groups: BookingBatch) -> list[BookingOutcome]:
        """Ask the books until they answer: a booking whose reply is lost is told by asking again."""
        if not groups:
            return []
        streak = 0
        while True:
            try:
                return await self.books.book(spot.key.show, groups)
            except RedisUnavailable:
                log.warning("books_away", show=str(spot.key.show))
                return [
                    BookingOutcome(declined=dict.fromkeys(group.tokens, DeclineReason.REDIS_OFF)) for group in groups
                ]
            except PostgresUnavailable as away:
                streak += 1
                log.warning("booking_in_doubt", reason=away.sentence)
                await self.clock.sleep(BOOKING_BACKOFF.pause_s(streak, 0.5))

    async def _publish(
        self,
        spot: PendingQueue,
        bundles: Sequence[BookingRequest],
        outcomes: Sequence[BookingOutcome],
        pools: Mapping[UUID, PoolId],
        since_ns: int,
    ) -> None:
        by_worker: dict[UUID, list[BookedSlice]] = defaultdict(list)
        frames = 0
        for bundle, outcome in zip(bundles, outcomes, strict=True):
            held = outcome.booked if not outcome.already else sorted(outcome.all_booked)
            if held:
                by_worker[bundle.asked.host] += _booked_slices(bundle, held)
                frames += len(held)
        if not by_worker:
            return
        failpoints.hit("dispatch.before_publish")
        spans = await self._start_spans(by_worker, since_ns) if tracing.is_enabled() else []
        messages = []
        for worker, given in by_worker.items():
            tokens = [token for _, held in given for token in held]
            self.registry.record_allocations(worker, to_ranges(tokens), spot.key.cls.need)
            messages += [(worker, part, self._message(worker, part)) for part in _split_by_size(given)]
            self.board.add_usage(spot.key.show, pools[worker], len(tokens) * spot.key.cls.need.cores)
        self.marks.record_dispatched(
            {part.piece.job for part, _ in (each for given in by_worker.values() for each in given)}
        )
        await self._send(messages)
        end_spans(spans)
        DISPATCHED.labels(spot.key.cls.topic).inc(frames)

    async def _start_spans(self, by_worker: Mapping[UUID, Sequence[BookedSlice]], since_ns: int) -> list[Span | None]:
        """Spans of what is handed over, those that are traced; their parts say so to the workers."""
        parts = [(part, worker, len(held)) for worker, given in by_worker.items() for part, held in given]
        spans = await self.traces.begin_dispatches(
            [
                TracedDispatch(part.piece.job, part.piece.layer, worker, part.piece.attempt, n)
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
        for at, (worker, given, _) in enumerate(messages):
            if at >= len(receipts) or not receipts[at].settled:
                await self._return_unsent(worker, [token for _, held in given for token in held])

    async def _return_unsent(self, worker: UUID, tokens: Sequence[int]) -> None:
        """Booked, and not handed over: one failed dispatch."""
        REFUSALS.labels("publish_failed").inc(len(tokens))
        ends = [AttemptResult(token, AttemptStatus.REFUSED, code="publish_failed") for token in tokens]
        told = await self.finisher.finish_attempts(worker, ends)
        self.registry.release_allocations(worker, told.freed)
        for show, deleted in told.released.items():
            self.board.capacity_released(show, deleted.frames)

    def _message(self, worker: UUID, given: Sequence[BookedSlice]) -> BusMessage:
        works: dict[bytes, int] = {}
        portions: list[AssignedRange] = []
        for part, held in given:
            piece, runnable = part.piece, part.runnable
            place = works.setdefault(runnable.work, len(works))
            offset = piece.frames.start - piece.tokens.start - runnable.first_frame
            for token, n in _token_ranges(held):
                portions.append(
                    AssignedRange(
                        token,
                        n,
                        piece.job,
                        piece.layer,
                        runnable.first_frame + (offset + token) * runnable.step,
                        piece.attempt,
                        place,
                        piece.payload if piece.payload is not None else runnable.input,
                        runnable.pointer,
                        runnable.step,
                        part.trace,
                    )
                )
        data = encode(Assignment([self._decode_work(work) for work in works], portions))
        return BusMessage(subject=JOBS_SUBJECT.format(worker), data=data, msg_id=f"assign:{portions[0].token}:{worker}")

    def _decode_work(self, packed: bytes) -> Work:
        work = self._works.get(packed)
        if work is None:
            if len(self._works) >= CACHE_MAX:
                self._works.clear()
            work = self._works[packed] = _WORK.decode(packed)
        return work

    async def _return_refused(
        self, spot: PendingQueue, bundles: Sequence[BookingRequest], outcomes: Sequence[BookingOutcome]
    ) -> None:
        """Give back what was not booked, and remember why, so that it is not asked again at once."""
        back: list[int] = []
        parked: dict[JobId, list[int]] = defaultdict(list)
        for bundle, outcome in zip(bundles, outcomes, strict=True):
            if outcome.refused and outcome.refusal is not None:
                if outcome.refusal.table in (Level.JOB, Level.LAYER):
                    parked[bundle.asked.charge.job] += outcome.refused
                else:
                    back += outcome.refused
                    self._record_refusal(spot, bundle, Reason.of_level(outcome.refusal.table))
            for token, why in outcome.declined.items():
                if why is DeclineReason.CAPPED:
                    parked[_job_of(bundle, token)].append(token)
                    continue
                back.append(token)
                self._record_refusal(spot, bundle, _DECLINE_REASONS.get(why, Reason.BOOKS_UNAVAILABLE))
        for job, tokens in parked.items():
            REFUSALS.labels(Reason.QUOTA_JOB.value).inc(len(tokens))
            await self.queue.park(tokens, job, rest_of=spot.lanes)
            self.parking.add(job)
        if back:
            REFUSALS.labels(spot.reason.value if spot.reason else "quota").inc(len(back))
            await self.queue.give_back(back)
        elif outcomes:
            self.board.mark_accepted(spot)

    def _record_refusal(self, spot: PendingQueue, bundle: BookingRequest, reason: Reason) -> None:
        if reason is Reason.QUOTA_SUBSCRIPTION:
            self.board.exclude_pool(spot, bundle.asked.charge.alloc)
        else:
            self.board.mark_refused(spot, reason)

    async def _discard_ended(self, pieces: Sequence[ClaimedRange], runnables: dict[LayerId, LayerExecution]) -> None:
        """Frames whose job is being ended wait for who ends it, and counts them; those of no live job have failed."""
        for piece in pieces:
            if piece.layer in runnables:
                await self.queue.park(piece.tokens, piece.job)
            else:
                gone = "Its job has ended: submit it again, linked to the old one."
                await self.queue.fail([FrameFailure(token, "job_ended", gone) for token in piece.tokens])


def _slice_by_worker(
    pieces: Sequence[ClaimedRange], plan: PlacementPlan, runnables: dict[LayerId, LayerExecution]
) -> list[WorkerSlice]:
    """Frames in their order onto the portions of the plan in theirs."""
    portions = iter(plan.portions)
    parts: list[WorkerSlice] = []
    worker, left = UUID(int=0), 0
    for piece in pieces:
        first = piece.tokens.start
        while first < piece.tokens.stop:
            if left == 0:
                portion = next(portions)
                worker, left = portion.worker, portion.n
            n = min(left, piece.tokens.stop - first)
            parts.append(WorkerSlice(piece, worker, range(first, first + n), runnables[piece.layer]))
            first += n
            left -= n
    return parts


def _split_by_size(given: Sequence[BookedSlice]) -> list[list[BookedSlice]]:
    """As few messages as hold all of it."""
    parts: list[list[BookedSlice]] = [[]]
    size = 0
    for each in given:
        part = each[0]
        more = len(part.piece.payload or part.runnable.input or b"")
        if parts[-1] and size + more > MESSAGE_BYTES_MAX:
            parts.append([])
            size = 0
        parts[-1].append(each)
        size += more
    return parts


def _booking_requests(
    spot: PendingQueue, parts: Sequence[WorkerSlice], pools: Mapping[UUID, PoolId]
) -> list[BookingRequest]:
    """Single frames of jobs without caps go as one swarm to each worker, everything else part by part."""
    bundles: list[BookingRequest] = []
    singles: dict[UUID, list[WorkerSlice]] = defaultdict(list)
    for part in parts:
        if len(part.tokens) == 1 and not part.runnable.capped:
            singles[part.worker].append(part)
        else:
            charge = _charge(spot, pools[part.worker], part.piece.job, part.piece.layer)
            bundles.append(BookingRequest([part], BookingGroup(charge, part.worker, part.tokens, part.runnable.capped)))
    for worker, alike in singles.items():
        tokens = [part.tokens.start for part in alike]
        jobs, layers = [part.piece.job for part in alike], [part.piece.layer for part in alike]
        charge = _charge(spot, pools[worker], JobId(NIL_UUID), LayerId(NIL_UUID))
        bundles.append(BookingRequest(alike, SingleFrameBatch(charge, worker, tokens, jobs, layers)))
    return bundles


def _charge(spot: PendingQueue, pool: PoolId, job: JobId, layer: LayerId) -> Charge:
    need = spot.key.cls.need
    return Charge(pool, spot.key.folder, job, layer, spot.key.dept, Centicores(need.cores), need.gpus)


def _booked_slices(bundle: BookingRequest, held: Sequence[int]) -> list[BookedSlice]:
    if isinstance(bundle.asked, BookingGroup):
        return [(bundle.parts[0], held)]
    if len(held) == len(bundle.parts):
        return [(part, part.tokens) for part in bundle.parts]
    booked = set(held)
    return [(part, part.tokens) for part in bundle.parts if part.tokens.start in booked]


def _job_of(bundle: BookingRequest, token: int) -> JobId:
    return next(part.piece.job for part in bundle.parts if token in part.tokens)


def _layer_execution(row: Record) -> LayerExecution:
    return LayerExecution(
        row["work"],
        row["input"],
        row["input_at"],
        row["capped"],
        row["ends_as"],
        row["first_frame"],
        row["frame_step"],
    )


def _token_ranges(tokens: Sequence[int]) -> list[tuple[int, int]]:
    if isinstance(tokens, range):
        return [(tokens.start, len(tokens))]
    return to_ranges(tokens)
