"""Handing a claimed batch to workers: read what it runs, book it, give back what was refused, publish the rest.

`rota.engine.dispatch` says what happens when we die between two of these steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final
from uuid import UUID

import msgspec
import structlog

from rota.accounting.books import Books
from rota.accounting.ledger import NOBODY, Batch, Charge, Group, Outcome, Swarm, Why
from rota.engine.board import Board, Spot
from rota.engine.finish import Finisher
from rota.engine.marks import Marks
from rota.engine.parking import Parking
from rota.engine.tenant import Tenants
from rota.engine.traces import Handed, Traces, now_ns
from rota.engine.traces import end as end_spans
from rota.infra import faults
from rota.infra.clock import Clock
from rota.infra.nats import Bus, Message
from rota.infra.postgres import Database, Record, query
from rota.infra.store import Store, Where
from rota.infra.telemetry import metrics, tracing
from rota.model.backoff import Backoff
from rota.model.errors import (
    BlobDamaged,
    BlobMissing,
    NatsUnavailable,
    PostgresUnavailable,
    RedisUnavailable,
    SetupFailed,
)
from rota.model.ids import JobId, LayerId, PoolId
from rota.model.messages import JOBS_SUBJECT, Assignment, End, Portion, Status, encode, runs_of
from rota.model.policy import Word
from rota.model.policy_effects import limited
from rota.model.quota import Level
from rota.model.reasons import Reason
from rota.model.units import Centicores
from rota.model.work import Work
from rota.placement import Plan, Registry
from rota.policy.words import Words
from rota.queue import Claim, Failure, Queue
from rota.queue.claims import Piece

if TYPE_CHECKING:
    from opentelemetry.trace import Span

log = structlog.get_logger(__name__)

LAYERS = query(__package__, "layers_to_run")

REMEMBERED: Final = 10_000
MESSAGE_BYTES: Final = 400_000
"""Inputs that travel in one message; NATS takes a megabyte, and an input has at most half of that."""
AGAIN: Final = Backoff(0.05, 2.0)

DISPATCHED = metrics.counter("rota_jobs_dispatched", "Frames handed to workers.", labels=("topic",))
REFUSALS = metrics.counter(
    "rota_dispatch_refusals", "Frames that went back to their place, by why.", labels=("reason",)
)

_WORK = msgspec.msgpack.Decoder(Work)
_ENCODE = msgspec.msgpack.Encoder(order="deterministic").encode
_DECLINES: Final = {
    Why.NO_SUBSCRIPTION: Reason.QUOTA_SUBSCRIPTION,
    Why.UNKNOWN_FOLDER: Reason.QUOTA_FOLDER,
    Why.UNKNOWN_DEPT: Reason.QUOTA_POINT,
}
"""Nothing is set up where it would be counted; everything else passes by itself."""


class Runnable(msgspec.Struct, frozen=True):
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


class Part(msgspec.Struct):
    """Frames of a piece that go to one worker."""

    piece: Piece
    worker: UUID
    tokens: range
    runnable: Runnable
    trace: str = ""


class Bundle(msgspec.Struct):
    """Parts that are booked as one, in the order of their tokens."""

    parts: list[Part]
    asked: Group | Swarm


Held = tuple[Part, Sequence[int]]
"""A part, and those of its tokens that were booked."""


class Handing:
    def __init__(
        self,
        database: Database,
        queue: Queue,
        books: Books,
        bus: Bus,
        registry: Registry,
        finisher: Finisher,
        store: Store,
        board: Board,
        marks: Marks,
        parking: Parking,
        tenants: Tenants,
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
        self.traces = Traces(database)
        self.words = Words(database)
        self._layers: dict[LayerId, Runnable] = {}
        self._works: dict[bytes, Work] = {}

    async def hand_out(self, spot: Spot, plan: Plan, claims: Sequence[Claim]) -> None:
        faults.at("dispatch.after_claim")
        since_ns = now_ns()
        pieces = [piece for claim in claims for piece in claim.pieces()]
        runnables = await self._runnables({piece.layer for piece in pieces})
        live = [piece for piece in pieces if (known := runnables.get(piece.layer)) and known.ends_as is None]
        if len(live) < len(pieces):
            await self._drop([piece for piece in pieces if piece not in live], runnables)
        if any(runnables[piece.layer].jobs_max for piece in live):
            self.tenants.note(spot.key.show)
        if spot.key.show in self.tenants.limited:
            live = await self._let_in(spot, live)
        parts = _placed(live, plan, runnables)
        pools = {portion.worker: portion.pool_id for portion in plan.portions}
        bundles = _bundled(spot, parts, pools)
        outcomes = await self._book(spot, [bundle.asked for bundle in bundles])
        await self._turn_down(spot, bundles, outcomes)
        await self._publish(spot, bundles, outcomes, pools, since_ns)

    async def _let_in(self, spot: Spot, pieces: Sequence[Piece]) -> list[Piece]:
        """Put aside what belongs to more jobs than the show may run at once."""
        let_in = await self.tenants.let_in(spot.key.show, [piece.job for piece in pieces])
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

    async def _runnables(self, layers: set[LayerId]) -> dict[LayerId, Runnable]:
        found = {layer: known for layer in layers if (known := self._layers.get(layer)) is not None}
        missing = [layer for layer in layers if layer not in found]
        if missing:
            rows = await self.database.rows(LAYERS, missing)
            words = await self.words.of({row["word"] for row in rows})
            for row in rows:
                ready = self._limited(_runnable(row), words.get(row["word"]))
                runnable = found[LayerId(row["pk_layer"])] = await self._with_input(ready)
                if row["frames"] > 1:
                    self._remember(row["pk_layer"], runnable)
        return found

    def _limited(self, runnable: Runnable, word: Word | None) -> Runnable:
        """Under the constraints of the word by which its job was let in."""
        if word is None or word.constraints is None:
            return runnable
        work = _ENCODE(limited(self._work(runnable.work), word.constraints))
        return msgspec.structs.replace(runnable, work=work, jobs_max=word.constraints.budgets.max_concurrent_jobs)

    async def _with_input(self, runnable: Runnable) -> Runnable:
        """A worker cannot read PostgreSQL, so what lies there travels."""
        if runnable.pointer is None or not runnable.pointer.startswith(Where.POSTGRES.value):
            return runnable
        try:
            data = await self.store.get(runnable.pointer)
        except (BlobMissing, BlobDamaged, SetupFailed) as gone:
            log.warning("input_missing", pointer=runnable.pointer, reason=gone.sentence)
            return runnable  # its worker says so, and the frame fails
        return msgspec.structs.replace(runnable, input=data, pointer=None)

    def _remember(self, layer: LayerId, runnable: Runnable) -> None:
        """Of a layer of many frames: that its job is being ended since is seen by whoever ends it."""
        if len(self._layers) >= REMEMBERED:
            self._layers.clear()
        self._layers[layer] = runnable

    async def _book(self, spot: Spot, groups: Batch) -> list[Outcome]:
        """Ask the books until they answer: a booking whose reply is lost is told by asking again."""
        if not groups:
            return []
        streak = 0
        while True:
            try:
                return await self.books.book(spot.key.show, groups)
            except RedisUnavailable:
                log.warning("books_away", show=str(spot.key.show))
                return [Outcome(declined=dict.fromkeys(group.tokens, Why.REDIS_OFF)) for group in groups]
            except PostgresUnavailable as away:
                streak += 1
                log.warning("booking_in_doubt", reason=away.sentence)
                await self.clock.sleep(AGAIN.pause_s(streak, 0.5))

    async def _publish(
        self,
        spot: Spot,
        bundles: Sequence[Bundle],
        outcomes: Sequence[Outcome],
        pools: Mapping[UUID, PoolId],
        since_ns: int,
    ) -> None:
        by_worker: dict[UUID, list[Held]] = defaultdict(list)
        frames = 0
        for bundle, outcome in zip(bundles, outcomes, strict=True):
            held = outcome.booked if not outcome.already else sorted(outcome.held)
            if held:
                by_worker[bundle.asked.host] += _held(bundle, held)
                frames += len(held)
        if not by_worker:
            return
        faults.at("dispatch.before_publish")
        spans = await self._traced(by_worker, since_ns) if tracing.on() else []
        messages = []
        for worker, given in by_worker.items():
            tokens = [token for _, held in given for token in held]
            self.registry.assigned(worker, runs_of(tokens), spot.key.cls.need)
            messages += [(worker, part, self._message(worker, part)) for part in _by_size(given)]
            self.board.used(spot.key.show, pools[worker], len(tokens) * spot.key.cls.need.cores)
        self.marks.dispatched({part.piece.job for part, _ in (each for given in by_worker.values() for each in given)})
        await self._send(messages)
        end_spans(spans)
        DISPATCHED.labels(spot.key.cls.topic).inc(frames)

    async def _traced(self, by_worker: Mapping[UUID, Sequence[Held]], since_ns: int) -> list[Span | None]:
        """Spans of what is handed over, those that are traced; their parts say so to the workers."""
        parts = [(part, worker, len(held)) for worker, given in by_worker.items() for part, held in given]
        spans = await self.traces.dispatching(
            [Handed(part.piece.job, part.piece.layer, worker, part.piece.attempt, n) for part, worker, n in parts],
            since_ns,
        )
        for (part, _, _), span in zip(parts, spans, strict=True):
            part.trace = tracing.traceparent(span) if span is not None else ""
        return spans

    async def _send(self, messages: Sequence[tuple[UUID, Sequence[Held], Message]]) -> None:
        try:
            receipts = await self.bus.publish_many([message for _, _, message in messages])
        except NatsUnavailable:
            receipts = []
        faults.reply("dispatch.publish")
        for at, (worker, given, _) in enumerate(messages):
            if at >= len(receipts) or not receipts[at].settled:
                await self._take_back(worker, [token for _, held in given for token in held])

    async def _take_back(self, worker: UUID, tokens: Sequence[int]) -> None:
        """Booked, and not handed over: one failed dispatch."""
        REFUSALS.labels("publish_failed").inc(len(tokens))
        ends = [End(token, Status.REFUSED, code="publish_failed") for token in tokens]
        told = await self.finisher.ended(worker, ends)
        self.registry.freed(worker, told.freed)
        for show, deleted in told.released.items():
            self.board.release(show, deleted.frames)

    def _message(self, worker: UUID, given: Sequence[Held]) -> Message:
        works: dict[bytes, int] = {}
        portions: list[Portion] = []
        for part, held in given:
            piece, runnable = part.piece, part.runnable
            place = works.setdefault(runnable.work, len(works))
            offset = piece.frames.start - piece.tokens.start - runnable.first_frame
            for token, n in _runs(held):
                portions.append(
                    Portion(
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
        data = encode(Assignment([self._work(work) for work in works], portions))
        return Message(subject=JOBS_SUBJECT.format(worker), data=data, msg_id=f"assign:{portions[0].token}:{worker}")

    def _work(self, packed: bytes) -> Work:
        work = self._works.get(packed)
        if work is None:
            if len(self._works) >= REMEMBERED:
                self._works.clear()
            work = self._works[packed] = _WORK.decode(packed)
        return work

    async def _turn_down(self, spot: Spot, bundles: Sequence[Bundle], outcomes: Sequence[Outcome]) -> None:
        """Give back what was not booked, and remember why, so that it is not asked again at once."""
        back: list[int] = []
        parked: dict[JobId, list[int]] = defaultdict(list)
        for bundle, outcome in zip(bundles, outcomes, strict=True):
            if outcome.refused and outcome.refusal is not None:
                if outcome.refusal.table in (Level.JOB, Level.LAYER):
                    parked[bundle.asked.charge.job] += outcome.refused
                else:
                    back += outcome.refused
                    self._refused(spot, bundle, Reason.of_level(outcome.refusal.table))
            for token, why in outcome.declined.items():
                if why is Why.CAPPED:
                    parked[_job_of(bundle, token)].append(token)
                    continue
                back.append(token)
                self._refused(spot, bundle, _DECLINES.get(why, Reason.BOOKS_UNAVAILABLE))
        for job, tokens in parked.items():
            REFUSALS.labels(Reason.QUOTA_JOB.value).inc(len(tokens))
            await self.queue.park(tokens, job, rest_of=spot.lanes)
            self.parking.note(job)
        if back:
            REFUSALS.labels(spot.reason.value if spot.reason else "quota").inc(len(back))
            await self.queue.give_back(back)
        elif outcomes:
            self.board.accepted(spot)

    def _refused(self, spot: Spot, bundle: Bundle, reason: Reason) -> None:
        if reason is Reason.QUOTA_SUBSCRIPTION:
            self.board.full_in(spot, bundle.asked.charge.alloc)
        else:
            self.board.refused(spot, reason)

    async def _drop(self, pieces: Sequence[Piece], runnables: dict[LayerId, Runnable]) -> None:
        """Frames whose job is being ended wait for who ends it, and counts them; those of no live job have failed."""
        for piece in pieces:
            if piece.layer in runnables:
                await self.queue.park(piece.tokens, piece.job)
            else:
                gone = "Its job has ended: submit it again, linked to the old one."
                await self.queue.fail([Failure(token, "job_ended", gone) for token in piece.tokens])


def _placed(pieces: Sequence[Piece], plan: Plan, runnables: dict[LayerId, Runnable]) -> list[Part]:
    """Frames in their order onto the portions of the plan in theirs."""
    portions = iter(plan.portions)
    parts: list[Part] = []
    worker, left = UUID(int=0), 0
    for piece in pieces:
        first = piece.tokens.start
        while first < piece.tokens.stop:
            if left == 0:
                portion = next(portions)
                worker, left = portion.worker, portion.n
            n = min(left, piece.tokens.stop - first)
            parts.append(Part(piece, worker, range(first, first + n), runnables[piece.layer]))
            first += n
            left -= n
    return parts


def _by_size(given: Sequence[Held]) -> list[list[Held]]:
    """As few messages as hold all of it."""
    parts: list[list[Held]] = [[]]
    size = 0
    for each in given:
        part = each[0]
        more = len(part.piece.payload or part.runnable.input or b"")
        if parts[-1] and size + more > MESSAGE_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(each)
        size += more
    return parts


def _bundled(spot: Spot, parts: Sequence[Part], pools: Mapping[UUID, PoolId]) -> list[Bundle]:
    """Single frames of jobs without caps go as one swarm to each worker, everything else part by part."""
    bundles: list[Bundle] = []
    singles: dict[UUID, list[Part]] = defaultdict(list)
    for part in parts:
        if len(part.tokens) == 1 and not part.runnable.capped:
            singles[part.worker].append(part)
        else:
            charge = _charge(spot, pools[part.worker], part.piece.job, part.piece.layer)
            bundles.append(Bundle([part], Group(charge, part.worker, part.tokens, part.runnable.capped)))
    for worker, alike in singles.items():
        tokens = [part.tokens.start for part in alike]
        jobs, layers = [part.piece.job for part in alike], [part.piece.layer for part in alike]
        charge = _charge(spot, pools[worker], JobId(NOBODY), LayerId(NOBODY))
        bundles.append(Bundle(alike, Swarm(charge, worker, tokens, jobs, layers)))
    return bundles


def _charge(spot: Spot, pool: PoolId, job: JobId, layer: LayerId) -> Charge:
    need = spot.key.cls.need
    return Charge(pool, spot.key.folder, job, layer, spot.key.dept, Centicores(need.cores), need.gpus)


def _held(bundle: Bundle, held: Sequence[int]) -> list[Held]:
    if isinstance(bundle.asked, Group):
        return [(bundle.parts[0], held)]
    if len(held) == len(bundle.parts):
        return [(part, part.tokens) for part in bundle.parts]
    booked = set(held)
    return [(part, part.tokens) for part in bundle.parts if part.tokens.start in booked]


def _job_of(bundle: Bundle, token: int) -> JobId:
    return next(part.piece.job for part in bundle.parts if token in part.tokens)


def _runnable(row: Record) -> Runnable:
    return Runnable(
        row["work"],
        row["input"],
        row["input_at"],
        row["capped"],
        row["ends_as"],
        row["first_frame"],
        row["frame_step"],
    )


def _runs(tokens: Sequence[int]) -> list[tuple[int, int]]:
    if isinstance(tokens, range):
        return [(tokens.start, len(tokens))]
    return runs_of(tokens)
