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

from rota.accounting import allocations
from rota.accounting.allocations import ProcDeleteResult
from rota.accounting.ledger import NIL_UUID, Charge, ReleasedTokens, SingleFrameBatch
from rota.accounting.service import AccountingService
from rota.engine.outputs import sync_check
from rota.engine.outputs.sync_check import CheckedFrames, SyncOutputChecker
from rota.engine.tracing import JobTracer, now_ns
from rota.infra import failpoints
from rota.infra.blob_store import PUT, BlobLocation, pointer_to, put_arguments
from rota.infra.postgres import Database, Record, Transaction, query
from rota.infra.telemetry import metrics, tracing
from rota.model.artifacts import format_artifact
from rota.model.backoff import Backoff, DispatchBackoff
from rota.model.errors import PostgresUnavailable, RotaError
from rota.model.ids import JobId, LayerId, ShowId
from rota.model.job_states import JobState
from rota.model.jobs.work import Retries, Work
from rota.model.policy.constraints import artifact_bytes, budgets_of
from rota.model.policy.decision import PolicyBudgets, PolicyDecision
from rota.model.protocol import FATAL_CODE, FATAL_CODES, Artifact, AttemptResult, AttemptStatus, TokenRange, to_ranges
from rota.model.reasons import Reason
from rota.model.settings.lifecycle import SchedulerSettings
from rota.policy.decision_store import DecisionStore
from rota.queue import Claim, FrameFailure, Queue
from rota.queue.failed import FailedFilter
from rota.queue.tokens import masks_of, tokens_in

SUCCEED = query(__package__, "frames_succeed")
BOOKED_FRAMES = query(__package__, "frames_held")
COUNT_ENDS = query(__package__, "layers_count")
END_AS = query(__package__, "job_end_as")
FINISH = query(__package__, "jobs_finish")
LAYERS = query(__package__, "layers_for_ends")
ADD_ENDS = query(__package__, "frame_ends_add")
FAILURES = query(__package__, "frame_failures")
DISPATCH_FAILED = query(__package__, "dispatch_failed")

COMPLETED = metrics.counter("rota_jobs_completed", "Jobs that ended, by how.", labels=("topic", "status"))
LATE_ENDS = metrics.counter("rota_frames_late", "Ends of attempts that had ended before, or were never the sender's.")
RETRIED = metrics.counter("rota_frames_retried", "Attempts that are tried again, by why.", labels=("reason",))

WORKER_LOST: Final = "worker_lost"
ARTIFACT_LIMIT: Final = "artifact_limit"
DEAD_LETTER_REASONS: Final = frozenset({"max_scheduling_retries", WORKER_LOST, Reason.MAX_RETRIES_EXCEEDED.value})
"""Ends that no handler decided about: somebody must look at them, so they are dead letters at once."""
FAILED_STATES: Final = ("FAILED", "TIMEOUT")
WORKER_LOST_BACKOFF: Final = Backoff(1.0, 60.0)
WORKER_LOST_JITTER_STEPS: Final = 8
RETRY_DELAY_MAX_S: Final = 86_400.0
_WORK = msgspec.msgpack.Decoder(Work)


class JobEnd(msgspec.Struct, frozen=True):
    """A job that ended in this transaction."""

    job: JobId
    show: ShowId
    topic: str
    state: JobState
    workflow_id: str | None


CompletionHook = Callable[[Transaction, Sequence[JobEnd]], Awaitable[None]]
"""Called with jobs that end, inside the transaction that ends them."""


class DeadLetterNotice(NamedTuple):
    """A frame, or its output, that went to the dead letters; `show` is None where it is not known."""

    reason: str
    show: ShowId | None
    job: JobId
    what: str = "frame"


class CompletionResult(msgspec.Struct):
    """What came of ending frames, for whoever tells Redis, the registry and the dispatcher."""

    released: dict[ShowId, ProcDeleteResult] = {}
    finished: list[JobEnd] = []
    freed: list[TokenRange] = []
    """Tokens whose procs are gone."""
    letters: list[DeadLetterNotice] = []
    failing: list[JobId] = []
    """Jobs that end now, since one of their frames has failed."""
    late: int = 0
    scans: bool = False
    """Whether outputs among these must be looked into."""
    since_ns: int = msgspec.field(default_factory=now_ns)
    """When ending them began."""


class AttemptOutcome(NamedTuple):
    """What becomes of one attempt."""

    state: str
    """A terminal word of FrameState; RETRIED: another attempt; RETURNED: the same attempt once more."""
    reason: str
    delay_s: float = 0.0
    ends_job: bool = False
    """Whether the other frames of its job are ended with it."""


class EndedAttempt(NamedTuple):
    """An attempt that is being ended, and all that is known of it."""

    end: AttemptResult
    show: ShowId
    job: JobId
    layer: LayerId
    frame: int
    attempt: int


class DispatchFailures(NamedTuple):
    """How often a job could not be dispatched by now, and how long all its frames of this batch wait for that."""

    failures: int
    pause_s: float


class Finisher:
    def __init__(
        self, database: Database, queue: Queue, books: AccountingService, pace: SchedulerSettings | None = None
    ) -> None:
        self.database = database
        self.queue = queue
        self.books = books
        self.hooks: list[CompletionHook] = []
        self.listeners: list[Callable[[Sequence[JobEnd]], None]] = []
        """Told after the commit of jobs that ended here; not of those whose commit lost its reply."""
        self.traces = JobTracer(database)
        self.words = DecisionStore(database)
        self.on_letters: Callable[[Sequence[DeadLetterNotice]], None] = _ignore
        """Called after the commit with frames that went to the dead letters."""
        self.end_early: Callable[[UUID], Awaitable[object]] = _ignore_failing_job
        """Ends what is left of a job that was marked as ending; the leader does it a moment later in any case."""
        self.outputs: SyncOutputChecker | None = None
        """Who looks at what frames return; None: nobody does."""
        self._pace = pace = pace or SchedulerSettings()
        self._dispatch_pauses = DispatchBackoff(pace.backoff_base, pace.backoff_max, pace.backoff_jitter)

    async def finish_succeeded(self, worker: UUID, runs: Sequence[TokenRange], took_ms: int = 0) -> CompletionResult:
        """Frames of one worker that returned nothing."""
        failpoints.hit("finish.before_success")
        with self._report_unknown_commit(lambda: _expand_ranges(sorted(runs))):
            if not self.hooks:
                told = await self._write_successes(self.database, worker, runs, took_ms)
            else:
                async with self.database.transaction() as tx:
                    told = await self._write_successes(tx, worker, runs, took_ms)
                    await self.run_hooks(tx, told.finished)
            failpoints.after_send("finish.success")
        await self.after_commit(told)
        return told

    async def finish_attempts(self, worker: UUID | None, ends: Sequence[AttemptResult]) -> CompletionResult:
        """Frames that have something to say. With no worker they end wherever they are (it was lost, or asked to)."""
        with self._report_unknown_commit(lambda: [end.token for end in ends]):
            async with self.database.transaction() as tx:
                told = await self._write_ends(tx, worker, ends)
                failpoints.hit("finish.before_commit")
            failpoints.after_send("finish.ended")
        await self.after_commit(told)
        return told

    async def fail_unplaceable(self, claims: Sequence[Claim], reason: str) -> CompletionResult:
        """Claimed frames that were never booked, and that nobody can ever run: failed, and in the dead letters."""
        pieces = [piece for claim in claims for piece in claim.ranges()]
        failures = [FrameFailure(token, reason) for piece in pieces for token in piece.tokens]
        told = CompletionResult()
        async with self.database.transaction() as tx:
            ended = await self.queue.fail(failures, on=tx)
            failed = [failure.token for failure in failures if failure.token not in ended.refused]
            await self.queue.failed.move_to_dead_letters(FailedFilter(tokens=failed), on=tx)
            numbers = [sum(token not in ended.refused for token in piece.tokens) for piece in pieces]
            jobs = await tx.value(COUNT_ENDS, [piece.layer for piece in pieces], numbers, "FAILED", 0)
            told.finished = await finish_jobs(tx, jobs, reason)
            await self.run_hooks(tx, told.finished)
        shows = {end.job: end.show for end in told.finished}
        told.letters = [
            DeadLetterNotice(reason, shows.get(job), job) for job in dict.fromkeys(piece.job for piece in pieces)
        ]
        await self.after_commit(told)
        return told

    @contextmanager
    def _report_unknown_commit(self, tokens: Callable[[], Sequence[int]]) -> Iterator[None]:
        """Of a transaction whose reply is lost nobody learns what to tell Redis: the books look into it."""
        try:
            yield
        except (PostgresUnavailable, failpoints.LostReply) as error:
            if getattr(error, "facts", {}).get("outcome", "unknown") == "unknown":
                self.books.add_unknown_commit(tokens())
            raise

    async def after_commit(self, told: CompletionResult) -> None:
        """After the commit. What is not told to Redis is found by the recount."""
        if told.letters:
            self.on_letters(told.letters)
        if told.scans and self.outputs is not None:
            self.outputs.due.set()
        for show, deleted in told.released.items():
            await self.books.publisher.publish(show, deleted)
        LATE_ENDS.inc(told.late)
        for failing in told.failing:
            with suppress(RotaError):
                await self.end_early(failing)
        for (topic, state), jobs in Counter((job.topic, job.state) for job in told.finished).items():
            COMPLETED.labels(topic, state).inc(jobs)
        if told.finished:
            for listener in self.listeners:
                listener(told.finished)
        if told.finished and tracing.is_enabled():
            await self.traces.record_finished(told.finished, told.since_ns)

    async def _write_successes(
        self, on: Database | Transaction, worker: UUID, runs: Sequence[TokenRange], took_ms: int
    ) -> CompletionResult:
        told = CompletionResult()
        left = list(runs)
        for _ in range(2):
            if not left:
                return told
            spans = sorted(left)
            tokens = _expand_ranges(spans)
            ids, masks = masks_of(tokens)
            firsts, lasts = [first for first, _ in spans], [first + n - 1 for first, n in spans]
            rows = await on.rows(SUCCEED, worker, ids, masks, firsts, lasts, took_ms)
            if not rows or rows[0]["what"] != "not_held":
                _read_success_rows(rows, told)
                return told
            held = sorted(rows[0]["tokens"])
            told.late += sum(n for _, n in left) - len(held)
            left = to_ranges(held)
        return told

    async def _write_ends(
        self, tx: Transaction, worker: UUID | None, ends: Sequence[AttemptResult]
    ) -> CompletionResult:
        told = CompletionResult()
        frames = await self._load_attempts(tx, worker, ends)
        told.late += len(ends) - len(frames)
        if not frames:
            return told
        endings = await self._decide_outcomes(tx, frames)
        frames = {token: _strip_excess_artifacts(frame, endings[token]) for token, frame in frames.items()}
        looked = CheckedFrames(frames, endings, {})
        if self.outputs is not None:
            looked = await self.outputs.check(tx, worker, looked)
        frames, endings = looked.frames, looked.endings
        late = await self._close_in_queue(tx, frames, endings)
        told.late += len(late)
        await self._delete_procs(tx, frames, told)
        accepted = {token: frame for token, frame in frames.items() if token not in late}
        await self._store_ends(tx, worker, accepted, looked)
        if self.outputs is not None:
            told.scans = await self.outputs.add_scans(tx, accepted, looked)
        await self._count_ends(tx, accepted, endings, told)
        told.letters = [
            DeadLetterNotice(endings[token].reason, frame.show, frame.job)
            for token, frame in accepted.items()
            if endings[token].state in FAILED_STATES and endings[token].reason in DEAD_LETTER_REASONS
        ]
        told.letters += await self._quarantine_outputs(tx, accepted, looked)
        return told

    async def _quarantine_outputs(
        self, tx: Transaction, frames: Mapping[int, EndedAttempt], looked: CheckedFrames
    ) -> list[DeadLetterNotice]:
        kept = await self.outputs.quarantine(tx, frames, looked) if self.outputs is not None else []
        if kept:
            await self.queue.dead_letters.add(sync_check.output_dead_letters(kept, Reason.OUTPUT_QUARANTINED), on=tx)
            await sync_check.audit_state_changes(tx, kept, "sync")
            sync_check.count_quarantined(kept, "sync")
        return [DeadLetterNotice(Reason.OUTPUT_QUARANTINED.value, one.show, one.job, "output") for one in kept]

    async def _load_attempts(
        self, tx: Transaction, worker: UUID | None, ends: Sequence[AttemptResult]
    ) -> dict[int, EndedAttempt]:
        by_token = {end.token: end for end in ends}
        held = {row["token"]: row for row in await tx.rows(BOOKED_FRAMES, worker, list(by_token))}
        turns = await self.queue.lookup_tokens(held, on=tx)
        return {
            token: EndedAttempt(
                by_token[token], row["pk_show"], row["pk_job"], row["pk_layer"], *turns.get(token, (0, 1))
            )
            for token, row in held.items()
        }

    async def _decide_outcomes(self, tx: Transaction, frames: Mapping[int, EndedAttempt]) -> dict[int, AttemptOutcome]:
        layers = {row["pk_layer"]: row for row in await tx.rows(LAYERS, list({f.layer for f in frames.values()}))}
        refused = [frame for frame in frames.values() if frame.end.status is AttemptStatus.REFUSED]
        undispatched = await self._count_dispatch_failures(tx, refused)
        words = await self.words.read({row["word"] for row in layers.values()}, on=tx)
        again = [frame for frame in frames.values() if frame.attempt > 1]
        before = await self._past_failures(tx, again) if again else {}
        return {
            token: self._decide_outcome(
                frame,
                layers.get(frame.layer),
                undispatched,
                before.get((frame.layer, frame.frame), (0, 0)),
                _budgets(layers.get(frame.layer), words),
            )
            for token, frame in frames.items()
        }

    def _decide_outcome(
        self,
        frame: EndedAttempt,
        layer: Record | None,
        undispatched: Mapping[UUID, DispatchFailures],
        before: tuple[int, int],
        budgets: PolicyBudgets,
    ) -> AttemptOutcome:
        end = frame.end
        ends_as = layer["ends_as"] if layer is not None else JobState.CANCELLED
        if end.status is AttemptStatus.SUCCEEDED:
            most = budgets.max_artifact_bytes
            too_much = most and end.artifacts and artifact_bytes(end.artifacts) > most
            return AttemptOutcome("FAILED", ARTIFACT_LIMIT) if too_much else AttemptOutcome("SUCCEEDED", "")
        if ends_as is not None:
            return AttemptOutcome(ends_as, end.code or ends_as.lower())
        assert layer is not None
        if end.status is AttemptStatus.REFUSED:
            met = undispatched.get(frame.job) or self._dispatch_failures(1)
            if met.failures >= self._pace.max_scheduling_retries:
                return AttemptOutcome("FAILED", "max_scheduling_retries")
            return AttemptOutcome("RETURNED", end.code or "dispatch_failed", met.pause_s)
        if end.status is AttemptStatus.CANCELLED:
            return AttemptOutcome("CANCELLED", end.code or "cancelled")
        work, (failed, lost) = _WORK.decode(layer["work"]), before
        retries = work.retries
        if end.code == WORKER_LOST:
            ending = _decide_retry_after_loss(
                end.token, lost, self._pace.max_worker_losses if retries.lost < 0 else retries.lost
            )
        else:
            ending = decide_retry(end, retries, failed)
        if ending.state == "RETRIED" and 0 <= budgets.max_retries <= failed + lost:
            state = "TIMEOUT" if end.status is AttemptStatus.TIMEOUT else "FAILED"
            ending = AttemptOutcome(state, Reason.MAX_RETRIES_EXCEEDED.value)
        return ending._replace(ends_job=work.fail_fast and ending.state in FAILED_STATES)

    async def _count_dispatch_failures(
        self, tx: Transaction, refused: Sequence[EndedAttempt]
    ) -> dict[UUID, DispatchFailures]:
        if not refused:
            return {}
        code = refused[0].end.code or "dispatch_failed"
        jobs = sorted({frame.job for frame in refused})
        rows = await tx.rows(DISPATCH_FAILED, jobs, code, self._pace.backoff_base, self._pace.backoff_max)
        return {row["pk_job"]: self._dispatch_failures(row["dispatch_failures"]) for row in rows}

    def _dispatch_failures(self, failures: int) -> DispatchFailures:
        return DispatchFailures(failures, self._dispatch_pauses.pause_s(failures - 1, _jitter()))

    async def _past_failures(
        self, tx: Transaction, frames: Sequence[EndedAttempt]
    ) -> dict[tuple[UUID, int], tuple[int, int]]:
        rows = await tx.rows(FAILURES, [frame.layer for frame in frames], [frame.frame for frame in frames])
        return {(row["pk_layer"], row["frame"]): (row["failed"], row["lost"]) for row in rows}

    async def _close_in_queue(
        self, tx: Transaction, frames: Mapping[int, EndedAttempt], endings: Mapping[int, AttemptOutcome]
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
                    failures = [
                        FrameFailure(token, why[token][:100], frames[token].end.error or None) for token in tokens
                    ]
                    ended = await self.queue.fail(failures, on=tx)
                    dead = [t for t in tokens if why[t] in DEAD_LETTER_REASONS and t not in ended.refused]
                    if dead:
                        await self.queue.failed.move_to_dead_letters(FailedFilter(tokens=dead), on=tx)
                case _:
                    ended = await self.queue.cancel_running(tokens, on=tx)
            late |= ended.refused
        return frozenset(late)

    async def _delete_procs(self, tx: Transaction, frames: Mapping[int, EndedAttempt], told: CompletionResult) -> None:
        by_show: dict[ShowId, list[int]] = defaultdict(list)
        for token, frame in frames.items():
            by_show[frame.show].append(token)
        for show in sorted(by_show):
            told.released[show] = await allocations.delete(tx, show, by_show[show])
        told.freed = to_ranges(list(frames))

    async def _store_ends(
        self, tx: Transaction, worker: UUID | None, frames: Mapping[int, EndedAttempt], looked: CheckedFrames
    ) -> None:
        """What a frame returned, and every attempt that failed; a plain success has nothing to remember."""
        endings = looked.endings
        kept = [
            (frame, endings[token])
            for token, frame in frames.items()
            if endings[token].state != "RETURNED" and (endings[token].state != "SUCCEEDED" or _has_output(frame.end))
        ]
        if not kept:
            return
        words = await _store_artifacts(tx, [frame.end.artifacts for frame, _ in kept])
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
            *sync_check.frame_end_columns(looked, [frame.end.token for frame, _ in kept]),
        )

    async def _count_ends(
        self,
        tx: Transaction,
        frames: Mapping[int, EndedAttempt],
        endings: Mapping[int, AttemptOutcome],
        told: CompletionResult,
    ) -> None:
        counted: dict[str, dict[LayerId, int]] = defaultdict(lambda: defaultdict(int))
        for token, frame in frames.items():
            if endings[token].state not in ("RETRIED", "RETURNED"):
                counted[endings[token].state][frame.layer] += 1
            else:
                RETRIED.labels(endings[token].reason).inc()
        jobs: set[UUID] = set()
        for state, layers in sorted(counted.items()):
            jobs |= set(await tx.value(COUNT_ENDS, list(layers), list(layers.values()), state, 0))
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


def _ignore(_letters: Sequence[DeadLetterNotice]) -> None:
    return None


async def _ignore_failing_job(_job: UUID) -> None:
    return None


def _has_output(end: AttemptResult) -> bool:
    return end.value is not None or end.pointer is not None or bool(end.artifacts)


async def _store_artifacts(tx: Transaction, left: Sequence[tuple[Artifact, ...]]) -> list[str]:
    """Artifacts of frames in words, a line each; those that came along are put into the store."""
    along = [each.data for artifacts in left for each in artifacts if not each.pointer]
    if along:
        await tx.run(PUT, *put_arguments(along)[1])
    return [
        "\n".join(
            format_artifact(each.pointer or str(pointer_to(each.data, BlobLocation.POSTGRES)), each.name)
            for each in artifacts
        )
        for artifacts in left
    ]


def _read_success_rows(rows: Sequence[Record], told: CompletionResult) -> None:
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


def _read_released(row: Record, told: CompletionResult, *, single: bool) -> None:
    """Procs of one layer; or of many jobs that are alike but for their ids, one token each."""
    alloc, folder, dept, cores, gpus = (row[name] for name in ("pk_alloc", "pk_folder", "pk_dept", "cores", "gpus"))
    jobs, layers, tokens = row["jobs"], row["layers"], row["tokens"]
    show = ShowId(row["pk_show"])
    before = told.released.get(show) or ProcDeleteResult([], row["managed"], row["fence"])
    released, swarms = before.released, before.swarms
    if single:
        charge = Charge(alloc, folder, JobId(NIL_UUID), LayerId(NIL_UUID), dept, cores, gpus)
        swarms = [*swarms, SingleFrameBatch(charge, NIL_UUID, tokens, jobs, layers)]
    else:
        released = [*released, ReleasedTokens(Charge(alloc, folder, jobs[0], layers[0], dept, cores, gpus), tokens)]
    told.released[show] = ProcDeleteResult(released, row["managed"], row["fence"], swarms)
    told.freed += to_ranges(tokens)


def job_end(row: Record) -> JobEnd:
    return JobEnd(
        JobId(row["pk_job"]), ShowId(row["pk_show"]), row["topic"], JobState(row["state"]), row["workflow_id"]
    )


def _budgets(layer: Record | None, words: Mapping[int, PolicyDecision]) -> PolicyBudgets:
    word = words.get(layer["word"]) if layer is not None else None
    return budgets_of(word.constraints if word is not None else None)


def _strip_excess_artifacts(frame: EndedAttempt, ending: AttemptOutcome) -> EndedAttempt:
    """What a policy does not let it leave behind is not kept."""
    if ending.reason != ARTIFACT_LIMIT:
        return frame
    error = "It left more bytes of artifacts than its policy allows."
    return frame._replace(end=msgspec.structs.replace(frame.end, artifacts=(), value=None, pointer=None, error=error))


def _decide_retry_after_loss(token: int, before: int, most: int) -> AttemptOutcome:
    """A frame whose worker was lost, as it was `before` times already.

    It may be the cause (a handler that ends its process) or only have been there when it happened. So the first time
    it goes back at once, and later after a pause that differs among neighbours: the cause comes back apart from them.
    """
    if before >= most:
        return AttemptOutcome("FAILED", WORKER_LOST)
    pause_s = (
        WORKER_LOST_BACKOFF.pause_s(before, token % WORKER_LOST_JITTER_STEPS / WORKER_LOST_JITTER_STEPS)
        if before
        else 0.0
    )
    return AttemptOutcome("RETRIED", WORKER_LOST, round(pause_s, 2))


def decide_retry(end: AttemptResult, retries: Retries, failed: int) -> AttemptOutcome:
    """Whether an attempt that failed is tried again; `failed` attempts did so before it."""
    code = end.code or end.status.lower()
    if end.status is AttemptStatus.FAILED_FATAL and code not in FATAL_CODES:
        code = FATAL_CODE
    timed_out = end.status is AttemptStatus.TIMEOUT
    kind = "timeout" if timed_out else "error"
    asked = end.status is AttemptStatus.FAILED_RETRYABLE
    if end.status is not AttemptStatus.FAILED_FATAL and failed < retries.most and (asked or kind in retries.on):
        pause_s = end.after_s or _backoff_s(Backoff(retries.first_s, retries.longest_s), failed + 1)
        return AttemptOutcome("RETRIED", code, min(pause_s, RETRY_DELAY_MAX_S))
    return AttemptOutcome("TIMEOUT" if timed_out else "FAILED", code)


def _backoff_s(pauses: Backoff, streak: int) -> float:
    return round(pauses.pause_s(streak, _jitter()), 2)


def _jitter() -> float:
    return secrets.randbelow(1000) / 1000


def _expand_ranges(spans: Sequence[TokenRange]) -> Sequence[int]:
    if len(spans) == 1:
        return range(spans[0][0], spans[0][0] + spans[0][1])
    return [token for first, n in spans for token in range(first, first + n)]
