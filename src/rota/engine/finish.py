"""How frames end, and jobs with them: one path, whoever says so (a worker, a timeout, a person, a lost machine).

Everything about an end is one transaction: the queue's closures, the procs, the counts of the layer, what the frame
returned, and the job itself, which moves to `job_done` with its last frame. Who keeps what:
- J3, ended once: the queue's closure under the lock of the claim. What it refuses is counted as late and changes
  nothing, but the proc of a late one goes all the same: its worker says that it no longer runs it;
- a worker ends its own frames only: procs are asked for by token and host;
- J1, a job ends once: the row that is deleted from `job` is the row that is inserted into `job_done`;
- hooks run inside the transaction, with the jobs that end in it; what they raise undoes all of it, and the report comes
  again.

If we die before the COMMIT nothing happened and the report comes again; after it, what is not done is done by the
repeat, which finds nothing left to end (the ack), and by the recount (Redis). If only the reply of the COMMIT is lost,
the books look a moment later which of the tokens lie in graves, and Redis forgets those.
"""

from __future__ import annotations

import secrets
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple
from uuid import UUID

import msgspec

from rota.accounting import procs
from rota.accounting.books import Books
from rota.accounting.ledger import NOBODY, Charge, Released, Swarm
from rota.accounting.procs import Deleted
from rota.engine import outputs
from rota.engine.outputs import Looked, Outputs
from rota.engine.traces import Traces, now_ns
from rota.infra import faults
from rota.infra.postgres import Database, Record, Transaction, query
from rota.infra.store import PUT, Where, pointer_to, put_arguments
from rota.infra.telemetry import metrics, tracing
from rota.model.artifacts import word
from rota.model.backoff import Backoff, DispatchBackoff
from rota.model.errors import PostgresUnavailable, RotaError
from rota.model.ids import JobId, LayerId, ShowId
from rota.model.lifecycle import JobState
from rota.model.messages import FATAL, FATAL_WORD, Artifact, End, Run, Status, runs_of
from rota.model.policy import Budgets, Word
from rota.model.policy_effects import artifact_bytes, budgets_of
from rota.model.reasons import Reason
from rota.model.settings.lifecycle import Scheduler
from rota.model.work import Retries, Work
from rota.policy.words import Words
from rota.queue import Claim, Failure, Queue
from rota.queue.failed import FailedFilter
from rota.queue.tokens import masks_of, tokens_in

SUCCEED = query(__package__, "frames_succeed")
HELD = query(__package__, "frames_held")
COUNT = query(__package__, "layers_count")
END_AS = query(__package__, "job_end_as")
FINISH = query(__package__, "jobs_finish")
LAYERS = query(__package__, "layers_for_ends")
ADD_ENDS = query(__package__, "frame_ends_add")
FAILURES = query(__package__, "frame_failures")
DISPATCH_FAILED = query(__package__, "dispatch_failed")

COMPLETED = metrics.counter("rota_jobs_completed", "Jobs that ended, by how.", labels=("topic", "status"))
LATE = metrics.counter("rota_frames_late", "Ends of attempts that had ended before, or were never the sender's.")
RETRIED = metrics.counter("rota_frames_retried", "Attempts that are tried again, by why.", labels=("reason",))

LOST: Final = "worker_lost"
TOO_MUCH: Final = "artifact_limit"
GIVEN_UP: Final = frozenset({"max_scheduling_retries", LOST, Reason.MAX_RETRIES_EXCEEDED.value})
"""Ends that no handler decided about: somebody must look at them, so they are dead letters at once."""
LETTER_STATES: Final = ("FAILED", "TIMEOUT")
LOST_PAUSES: Final = Backoff(1.0, 60.0)
LOST_SPREAD: Final = 8
PAUSE_MAX_S: Final = 86_400.0
_WORK = msgspec.msgpack.Decoder(Work)


class JobEnd(msgspec.Struct, frozen=True):
    """A job that ended in this transaction."""

    job: JobId
    show: ShowId
    topic: str
    state: JobState
    workflow_id: str | None


Hook = Callable[[Transaction, Sequence[JobEnd]], Awaitable[None]]
"""Called with jobs that end, inside the transaction that ends them."""


class Letter(NamedTuple):
    """A frame, or its output, that went to the dead letters; `show` is None where it is not known."""

    reason: str
    show: ShowId | None
    job: JobId
    what: str = "frame"


class Told(msgspec.Struct):
    """What came of ending frames, for whoever tells Redis, the registry and the dispatcher."""

    released: dict[ShowId, Deleted] = {}
    finished: list[JobEnd] = []
    freed: list[Run] = []
    """Tokens whose procs are gone."""
    letters: list[Letter] = []
    failing: list[JobId] = []
    """Jobs that end now, since one of their frames has failed."""
    late: int = 0
    scans: bool = False
    """Whether outputs among these must be looked into."""
    since_ns: int = msgspec.field(default_factory=now_ns)
    """When ending them began."""


class Ending(NamedTuple):
    """What becomes of one attempt."""

    state: str
    """A terminal word of FrameState; RETRIED: another attempt; RETURNED: the same attempt once more."""
    reason: str
    delay_s: float = 0.0
    ends_job: bool = False
    """Whether the other frames of its job are ended with it."""


class Frame(NamedTuple):
    """An attempt that is being ended, and all that is known of it."""

    end: End
    show: ShowId
    job: JobId
    layer: LayerId
    frame: int
    attempt: int


class Undispatched(NamedTuple):
    """How often a job could not be dispatched by now, and how long all its frames of this batch wait for that."""

    failures: int
    pause_s: float


class Finisher:
    def __init__(self, database: Database, queue: Queue, books: Books, pace: Scheduler | None = None) -> None:
        self.database = database
        self.queue = queue
        self.books = books
        self.hooks: list[Hook] = []
        self.listeners: list[Callable[[Sequence[JobEnd]], None]] = []
        """Told after the commit of jobs that ended here; not of those whose commit lost its reply."""
        self.traces = Traces(database)
        self.words = Words(database)
        self.on_letters: Callable[[Sequence[Letter]], None] = _ignore
        """Called after the commit with frames that went to the dead letters."""
        self.end_early: Callable[[UUID], Awaitable[object]] = _leave
        """Ends what is left of a job that was marked as ending; the leader does it a moment later in any case."""
        self.outputs: Outputs | None = None
        """Who looks at what frames return; None: nobody does."""
        self._pace = pace = pace or Scheduler()
        self._dispatch_pauses = DispatchBackoff(pace.backoff_base, pace.backoff_max, pace.backoff_jitter)

    async def succeeded(self, worker: UUID, runs: Sequence[Run], took_ms: int = 0) -> Told:
        """Frames of one worker that returned nothing."""
        faults.at("finish.before_success")
        with self._in_doubt(lambda: _tokens_of(sorted(runs))):
            if not self.hooks:
                told = await self._succeed(self.database, worker, runs, took_ms)
            else:
                async with self.database.transaction() as tx:
                    told = await self._succeed(tx, worker, runs, took_ms)
                    await self.run_hooks(tx, told.finished)
            faults.reply("finish.success")
        await self.tell(told)
        return told

    async def ended(self, worker: UUID | None, ends: Sequence[End]) -> Told:
        """Frames that have something to say. With no worker they end wherever they are (it was lost, or asked to)."""
        with self._in_doubt(lambda: [end.token for end in ends]):
            async with self.database.transaction() as tx:
                told = await self._end(tx, worker, ends)
                faults.at("finish.before_commit")
            faults.reply("finish.ended")
        await self.tell(told)
        return told

    async def unplaceable(self, claims: Sequence[Claim], reason: str) -> Told:
        """Claimed frames that were never booked, and that nobody can ever run: failed, and in the dead letters."""
        pieces = [piece for claim in claims for piece in claim.pieces()]
        failures = [Failure(token, reason) for piece in pieces for token in piece.tokens]
        told = Told()
        async with self.database.transaction() as tx:
            ended = await self.queue.fail(failures, on=tx)
            failed = [failure.token for failure in failures if failure.token not in ended.refused]
            await self.queue.failed.move_to_dead_letters(FailedFilter(tokens=failed), on=tx)
            numbers = [sum(token not in ended.refused for token in piece.tokens) for piece in pieces]
            jobs = await tx.value(COUNT, [piece.layer for piece in pieces], numbers, "FAILED", 0)
            told.finished = await finish_jobs(tx, jobs, reason)
            await self.run_hooks(tx, told.finished)
        shows = {end.job: end.show for end in told.finished}
        told.letters = [Letter(reason, shows.get(job), job) for job in dict.fromkeys(piece.job for piece in pieces)]
        await self.tell(told)
        return told

    @contextmanager
    def _in_doubt(self, tokens: Callable[[], Sequence[int]]) -> Iterator[None]:
        """Of a transaction whose reply is lost nobody learns what to tell Redis: the books look into it."""
        try:
            yield
        except (PostgresUnavailable, faults.LostReply) as error:
            if getattr(error, "facts", {}).get("outcome", "unknown") == "unknown":
                self.books.doubt(tokens())
            raise

    async def tell(self, told: Told) -> None:
        """After the commit. What is not told to Redis is found by the recount."""
        if told.letters:
            self.on_letters(told.letters)
        if told.scans and self.outputs is not None:
            self.outputs.due.set()
        for show, deleted in told.released.items():
            await self.books.publisher.released(show, deleted)
        LATE.inc(told.late)
        for failing in told.failing:
            with suppress(RotaError):
                await self.end_early(failing)
        for (topic, state), jobs in Counter((job.topic, job.state) for job in told.finished).items():
            COMPLETED.labels(topic, state).inc(jobs)
        if told.finished:
            for listener in self.listeners:
                listener(told.finished)
        if told.finished and tracing.on():
            await self.traces.finished(told.finished, told.since_ns)

    async def _succeed(self, on: Database | Transaction, worker: UUID, runs: Sequence[Run], took_ms: int) -> Told:
        told = Told()
        left = list(runs)
        for _ in range(2):
            if not left:
                return told
            spans = sorted(left)
            tokens = _tokens_of(spans)
            ids, masks = masks_of(tokens)
            firsts, lasts = [first for first, _ in spans], [first + n - 1 for first, n in spans]
            rows = await on.rows(SUCCEED, worker, ids, masks, firsts, lasts, took_ms)
            if not rows or rows[0]["what"] != "not_held":
                _read(rows, told)
                return told
            held = sorted(rows[0]["tokens"])
            told.late += sum(n for _, n in left) - len(held)
            left = runs_of(held)
        return told

    async def _end(self, tx: Transaction, worker: UUID | None, ends: Sequence[End]) -> Told:
        told = Told()
        frames = await self._known(tx, worker, ends)
        told.late += len(ends) - len(frames)
        if not frames:
            return told
        endings = await self._judged(tx, frames)
        frames = {token: _without_excess(frame, endings[token]) for token, frame in frames.items()}
        looked = Looked(frames, endings, {})
        if self.outputs is not None:
            looked = await self.outputs.look(tx, worker, looked)
        frames, endings = looked.frames, looked.endings
        late = await self._close(tx, frames, endings)
        told.late += len(late)
        await self._release(tx, frames, told)
        accepted = {token: frame for token, frame in frames.items() if token not in late}
        await self._remember(tx, worker, accepted, looked)
        if self.outputs is not None:
            told.scans = await self.outputs.add_scans(tx, accepted, looked)
        await self._count(tx, accepted, endings, told)
        told.letters = [
            Letter(endings[token].reason, frame.show, frame.job)
            for token, frame in accepted.items()
            if endings[token].state in LETTER_STATES and endings[token].reason in GIVEN_UP
        ]
        told.letters += await self._keep_back(tx, accepted, looked)
        return told

    async def _keep_back(self, tx: Transaction, frames: Mapping[int, Frame], looked: Looked) -> list[Letter]:
        kept = await self.outputs.keep_back(tx, frames, looked) if self.outputs is not None else []
        if kept:
            await self.queue.dead_letters.add(outputs.letters(kept, Reason.OUTPUT_QUARANTINED), on=tx)
            await outputs.audit_kept(tx, kept, "sync")
            outputs.count_kept(kept, "sync")
        return [Letter(Reason.OUTPUT_QUARANTINED.value, one.show, one.job, "output") for one in kept]

    async def _known(self, tx: Transaction, worker: UUID | None, ends: Sequence[End]) -> dict[int, Frame]:
        by_token = {end.token: end for end in ends}
        held = {row["token"]: row for row in await tx.rows(HELD, worker, list(by_token))}
        turns = await self.queue.look(held, on=tx)
        return {
            token: Frame(by_token[token], row["pk_show"], row["pk_job"], row["pk_layer"], *turns.get(token, (0, 1)))
            for token, row in held.items()
        }

    async def _judged(self, tx: Transaction, frames: Mapping[int, Frame]) -> dict[int, Ending]:
        layers = {row["pk_layer"]: row for row in await tx.rows(LAYERS, list({f.layer for f in frames.values()}))}
        refused = [frame for frame in frames.values() if frame.end.status is Status.REFUSED]
        undispatched = await self._count_refusals(tx, refused)
        words = await self.words.of({row["word"] for row in layers.values()}, on=tx)
        again = [frame for frame in frames.values() if frame.attempt > 1]
        before = await self._failures(tx, again) if again else {}
        return {
            token: self._judge(
                frame,
                layers.get(frame.layer),
                undispatched,
                before.get((frame.layer, frame.frame), (0, 0)),
                _budgets(layers.get(frame.layer), words),
            )
            for token, frame in frames.items()
        }

    def _judge(
        self,
        frame: Frame,
        layer: Record | None,
        undispatched: Mapping[UUID, Undispatched],
        before: tuple[int, int],
        budgets: Budgets,
    ) -> Ending:
        end = frame.end
        ends_as = layer["ends_as"] if layer is not None else JobState.CANCELLED
        if end.status is Status.SUCCEEDED:
            most = budgets.max_artifact_bytes
            too_much = most and end.artifacts and artifact_bytes(end.artifacts) > most
            return Ending("FAILED", TOO_MUCH) if too_much else Ending("SUCCEEDED", "")
        if ends_as is not None:
            return Ending(ends_as, end.code or ends_as.lower())
        assert layer is not None
        if end.status is Status.REFUSED:
            met = undispatched.get(frame.job) or self._undispatched(1)
            if met.failures >= self._pace.max_scheduling_retries:
                return Ending("FAILED", "max_scheduling_retries")
            return Ending("RETURNED", end.code or "dispatch_failed", met.pause_s)
        if end.status is Status.CANCELLED:
            return Ending("CANCELLED", end.code or "cancelled")
        work, (failed, lost) = _WORK.decode(layer["work"]), before
        retries = work.retries
        if end.code == LOST:
            ending = _lost(end.token, lost, self._pace.max_worker_losses if retries.lost < 0 else retries.lost)
        else:
            ending = after_failure(end, retries, failed)
        if ending.state == "RETRIED" and 0 <= budgets.max_retries <= failed + lost:
            state = "TIMEOUT" if end.status is Status.TIMEOUT else "FAILED"
            ending = Ending(state, Reason.MAX_RETRIES_EXCEEDED.value)
        return ending._replace(ends_job=work.fail_fast and ending.state in LETTER_STATES)

    async def _count_refusals(self, tx: Transaction, refused: Sequence[Frame]) -> dict[UUID, Undispatched]:
        if not refused:
            return {}
        code = refused[0].end.code or "dispatch_failed"
        jobs = sorted({frame.job for frame in refused})
        rows = await tx.rows(DISPATCH_FAILED, jobs, code, self._pace.backoff_base, self._pace.backoff_max)
        return {row["pk_job"]: self._undispatched(row["dispatch_failures"]) for row in rows}

    def _undispatched(self, failures: int) -> Undispatched:
        return Undispatched(failures, self._dispatch_pauses.pause_s(failures - 1, _chance()))

    async def _failures(self, tx: Transaction, frames: Sequence[Frame]) -> dict[tuple[UUID, int], tuple[int, int]]:
        rows = await tx.rows(FAILURES, [frame.layer for frame in frames], [frame.frame for frame in frames])
        return {(row["pk_layer"], row["frame"]): (row["failed"], row["lost"]) for row in rows}

    async def _close(
        self, tx: Transaction, frames: Mapping[int, Frame], endings: Mapping[int, Ending]
    ) -> frozenset[int]:
        """End the turns in the queue; returns those that had ended before."""
        late: set[int] = set()
        by_ending: dict[tuple[str, float], list[int]] = defaultdict(list)
        for token, ending in endings.items():
            by_ending[ending.state, ending.delay_s].append(token)
        for (state, delay_s), tokens in sorted(by_ending.items()):
            match state:
                case "SUCCEEDED" | "OUTPUT_QUARANTINED":
                    ended = await self.queue.complete(tokens, on=tx)
                case "RETRIED":
                    ended = await self.queue.retry(tokens, delay_s, on=tx)
                case "RETURNED":
                    ended = await self.queue.defer(tokens, delay_s, on=tx)
                case "FAILED" | "TIMEOUT":
                    why = {token: endings[token].reason for token in tokens}
                    failures = [Failure(token, why[token][:100], frames[token].end.error or None) for token in tokens]
                    ended = await self.queue.fail(failures, on=tx)
                    dead = [t for t in tokens if why[t] in GIVEN_UP and t not in ended.refused]
                    if dead:
                        await self.queue.failed.move_to_dead_letters(FailedFilter(tokens=dead), on=tx)
                case _:
                    ended = await self.queue.cancel_running(tokens, on=tx)
            late |= ended.refused
        return frozenset(late)

    async def _release(self, tx: Transaction, frames: Mapping[int, Frame], told: Told) -> None:
        by_show: dict[ShowId, list[int]] = defaultdict(list)
        for token, frame in frames.items():
            by_show[frame.show].append(token)
        for show in sorted(by_show):
            told.released[show] = await procs.delete(tx, show, by_show[show])
        told.freed = runs_of(list(frames))

    async def _remember(
        self, tx: Transaction, worker: UUID | None, frames: Mapping[int, Frame], looked: Looked
    ) -> None:
        """What a frame returned, and every attempt that failed; a plain success has nothing to remember."""
        endings = looked.endings
        kept = [
            (frame, endings[token])
            for token, frame in frames.items()
            if endings[token].state != "RETURNED" and (endings[token].state != "SUCCEEDED" or _has_something(frame.end))
        ]
        if not kept:
            return
        words = await _stored(tx, [frame.end.artifacts for frame, _ in kept])
        await tx.run(
            ADD_ENDS,
            [frame.layer for frame, _ in kept],
            [frame.frame for frame, _ in kept],
            [frame.attempt for frame, _ in kept],
            [frame.end.token for frame, _ in kept],
            [ending.state for _, ending in kept],
            [frame.end.value for frame, _ in kept],
            [frame.end.pointer for frame, _ in kept],
            [ending.reason or None for _, ending in kept],
            [frame.end.error.replace("\0", "") or None for frame, _ in kept],
            [min(frame.end.took_ms, 2**31 - 1) for frame, _ in kept],
            worker,
            words,
            *outputs.columns(looked, [frame.end.token for frame, _ in kept]),
        )

    async def _count(
        self, tx: Transaction, frames: Mapping[int, Frame], endings: Mapping[int, Ending], told: Told
    ) -> None:
        counted: dict[str, dict[LayerId, int]] = defaultdict(lambda: defaultdict(int))
        for token, frame in frames.items():
            if endings[token].state not in ("RETRIED", "RETURNED"):
                counted[endings[token].state][frame.layer] += 1
            else:
                RETRIED.labels(endings[token].reason).inc()
        jobs: set[UUID] = set()
        for state, layers in sorted(counted.items()):
            jobs |= set(await tx.value(COUNT, list(layers), list(layers.values()), state, 0))
        if jobs:
            told.finished = await finish_jobs(tx, jobs)
            await self.run_hooks(tx, told.finished)
        failing = {frame.job: endings[token].state for token, frame in frames.items() if endings[token].ends_job}
        for job in sorted(failing.keys() - {end.job for end in told.finished}):
            await tx.row(END_AS, job, failing[job], Reason.FRAME_FAILED.value)
            told.failing.append(job)

    async def run_hooks(self, tx: Transaction, finished: Sequence[JobEnd]) -> None:
        if finished:
            for hook in self.hooks:
                await hook(tx, finished)


async def finish_jobs(tx: Transaction, jobs: Iterable[UUID], because: str | None = None) -> list[JobEnd]:
    """End those of the jobs that have no frame left."""
    return [job_end(row) for row in await tx.rows(FINISH, sorted(jobs), because)]


def _ignore(_letters: Sequence[Letter]) -> None:
    return None


async def _leave(_job: UUID) -> None:
    return None


def _has_something(end: End) -> bool:
    return end.value is not None or end.pointer is not None or bool(end.artifacts)


async def _stored(tx: Transaction, left: Sequence[tuple[Artifact, ...]]) -> list[str]:
    """Artifacts of frames in words, a line each; those that came along are put into the store."""
    along = [each.data for artifacts in left for each in artifacts if not each.pointer]
    if along:
        await tx.run(PUT, *put_arguments(along)[1])
    return [
        "\n".join(word(each.pointer or str(pointer_to(each.data, Where.POSTGRES)), each.name) for each in artifacts)
        for artifacts in left
    ]


def _read(rows: Sequence[Record], told: Told) -> None:
    for row in rows:
        match row["what"]:
            case "refused":
                told.late += len(tokens_in(row["claim_id"], row["refused"]))
            case "finished":
                show, topic, state, workflow = (
                    ShowId(row["pk_show"]),
                    row["topic"],
                    JobState(row["state"]),
                    row["workflow_id"],
                )
                told.finished += [JobEnd(job, show, topic, state, workflow) for job in row["jobs"]]
            case what:
                _read_released(row, told, single=what == "singles")


def _read_released(row: Record, told: Told, *, single: bool) -> None:
    """Procs of one layer; or of many jobs that are alike but for their ids, one token each."""
    alloc, folder, dept, cores, gpus = (row[name] for name in ("pk_alloc", "pk_folder", "pk_dept", "cores", "gpus"))
    jobs, layers, tokens = row["jobs"], row["layers"], row["tokens"]
    show = ShowId(row["pk_show"])
    before = told.released.get(show) or Deleted([], row["managed"], row["fence"])
    released, swarms = before.released, before.swarms
    if single:
        charge = Charge(alloc, folder, JobId(NOBODY), LayerId(NOBODY), dept, cores, gpus)
        swarms = [*swarms, Swarm(charge, NOBODY, tokens, jobs, layers)]
    else:
        released = [*released, Released(Charge(alloc, folder, jobs[0], layers[0], dept, cores, gpus), tokens)]
    told.released[show] = Deleted(released, row["managed"], row["fence"], swarms)
    told.freed += runs_of(tokens)


def job_end(row: Record) -> JobEnd:
    return JobEnd(
        JobId(row["pk_job"]), ShowId(row["pk_show"]), row["topic"], JobState(row["state"]), row["workflow_id"]
    )


def _budgets(layer: Record | None, words: Mapping[int, Word]) -> Budgets:
    word = words.get(layer["word"]) if layer is not None else None
    return budgets_of(word.constraints if word is not None else None)


def _without_excess(frame: Frame, ending: Ending) -> Frame:
    """What a policy does not let it leave behind is not kept."""
    if ending.reason != TOO_MUCH:
        return frame
    error = "It left more bytes of artifacts than its policy allows."
    return frame._replace(end=msgspec.structs.replace(frame.end, artifacts=(), value=None, pointer=None, error=error))


def _lost(token: int, before: int, most: int) -> Ending:
    """A frame whose worker was lost, as it was `before` times already.

    It may be the cause (a handler that ends its process) or only have been there when it happened. So the first time
    it goes back at once, and later after a pause that differs among neighbours: the cause comes back apart from them.
    """
    if before >= most:
        return Ending("FAILED", LOST)
    pause_s = LOST_PAUSES.pause_s(before, token % LOST_SPREAD / LOST_SPREAD) if before else 0.0
    return Ending("RETRIED", LOST, round(pause_s, 2))


def after_failure(end: End, retries: Retries, failed: int) -> Ending:
    """Whether an attempt that failed is tried again; `failed` attempts did so before it."""
    code = end.code or end.status.lower()
    if end.status is Status.FAILED_FATAL and code not in FATAL:
        code = FATAL_WORD
    timed_out = end.status is Status.TIMEOUT
    kind = "timeout" if timed_out else "error"
    asked = end.status is Status.FAILED_RETRYABLE
    if end.status is not Status.FAILED_FATAL and failed < retries.most and (asked or kind in retries.on):
        pause_s = end.after_s or _pause_s(Backoff(retries.first_s, retries.longest_s), failed + 1)
        return Ending("RETRIED", code, min(pause_s, PAUSE_MAX_S))
    return Ending("TIMEOUT" if timed_out else "FAILED", code)


def _pause_s(pauses: Backoff, streak: int) -> float:
    return round(pauses.pause_s(streak, _chance()), 2)


def _chance() -> float:
    return secrets.randbelow(1000) / 1000


def _tokens_of(spans: Sequence[Run]) -> Sequence[int]:
    if len(spans) == 1:
        return range(spans[0][0], spans[0][0] + spans[0][1])
    return [token for first, n in spans for token in range(first, first + n)]
