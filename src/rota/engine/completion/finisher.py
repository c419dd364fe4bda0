"""Ends attempts, frames and jobs: one path for every cause (a worker's report, a timeout, a person, a lost worker).

Everything about an end is one transaction: the queue's closures, the procs, the layer's counts, the frame's output,
and the job itself, which moves to `job_done` with its last frame. Invariants and who enforces them:
- J3, an attempt ends once: the queue's closure under the lock of the claim. A refused end counts as late and changes
  nothing, except that its proc is deleted: its worker reports that it no longer runs;
- a worker ends only its own frames: procs are looked up by token and host;
- J1, a job ends once: the row that is deleted from `job` is the row that is inserted into `job_done`.

If the process dies before the COMMIT, nothing happened and the report is redelivered. After it, the redelivery finds
nothing left to end and is acknowledged, and reconciliation corrects Redis. If only the reply of the COMMIT is lost,
accounting checks shortly after which of the tokens are tombstoned and releases those in Redis.

Frames of several shows end in one transaction, as long as no show is locked; then each show gets its own, and the
frames of a locked one are left as they are (`CompletionResult.locked`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple
from uuid import UUID

import msgspec

from rota.accounting import allocations
from rota.accounting.allocations import ProcDeleteResult
from rota.accounting.ledger import NIL_UUID, Charge, ReleasedTokens, SingleFrameBatch
from rota.accounting.show_isolation import LOCK_WAIT_S
from rota.engine.completion.canceller import JobCanceller
from rota.engine.completion.job_ends import COUNT_ENDS, END_AS, JobEnd, finish_jobs
from rota.engine.completion.publisher import CompletionPublisher, CompletionResult, DeadLetterNotice
from rota.engine.completion.retry_decision import (
    WORKER_LOST,
    AttemptOutcome,
    decide_retry,
    decide_retry_after_loss,
    jitter,
    known_code,
)
from rota.engine.outputs import sync_check
from rota.engine.outputs.sync_check import CheckedFrames, SyncOutputChecker
from rota.infra import failpoints
from rota.infra.blob_store import PUT, BlobLocation, pointer_to, put_arguments
from rota.infra.postgres import Database, Record, Transaction, query
from rota.infra.telemetry import metrics
from rota.model.artifacts import format_artifact
from rota.model.attempt_codes import AttemptCode
from rota.model.backoff import DispatchBackoff
from rota.model.errors import PostgresBusy, PostgresUnavailable, RotaError
from rota.model.ids import JobId, LayerId, ShowId
from rota.model.job_states import JobState
from rota.model.jobs.work import Work
from rota.model.policy.constraints import artifact_bytes, budgets_of
from rota.model.policy.decision import PolicyBudgets, PolicyDecision
from rota.model.protocol import Artifact, AttemptResult, AttemptStatus
from rota.model.reasons import Reason
from rota.model.settings.lifecycle import SchedulerSettings
from rota.model.token_ranges import (
    TokenRange,
    count_tokens,
    expand_ranges,
    iterate_tokens,
    span_columns,
    to_ranges,
    tokens_in_range,
)
from rota.policy.decision_store import DecisionStore
from rota.queue import Claim, FrameFailure, Queue
from rota.queue.failed import FailedFilter
from rota.queue.tokens import masks_of, tokens_in

SUCCEED = query(__package__, "frames_succeed")
SUCCEED_WITH_RESULTS = query(__package__, "frames_succeed_with_results")
BOOKED_FRAMES = query(__package__, "frames_held")
LAYERS = query(__package__, "layers_for_ends")
ADD_ENDS = query(__package__, "frame_ends_add")
FAILURES = query(__package__, "frame_failures")
DISPATCH_FAILED = query(__package__, "dispatch_failed")
QUEUES_OF_LAYERS = query(__package__, "queues_of_layers")
NOTIFY_QUEUE = query("rota.queue", "wake")

RETRIED = metrics.counter("rota_frames_retried", "Attempts that are retried, by reason.", labels=("reason",))

DEAD_LETTER_REASONS: Final = frozenset(
    {Reason.DISPATCH_FAILED.value, Reason.WORKER_LOST.value, Reason.MAX_RETRIES_EXCEEDED.value}
)
"""Ends that no handler decided on: an operator must look at them, so they are dead letters immediately."""
FAILED_STATES: Final = ("FAILED", "TIMEOUT")
TOOK_MS_MAX: Final = 2**31 - 1
"""As the column stores."""
UNUSED_STATES: Final = ("RETURNED", "HANDED_BACK", "RERUN")
"""The frame is dispatched again, and nothing of this attempt is kept."""
SERIES_STATES: Final = {AttemptCode.HANDED_BACK: "HANDED_BACK", AttemptCode.SERIES_LOST: "RERUN"}
"""What becomes of frames that waited in a series: no dispatch has failed."""
_WORK = msgspec.msgpack.Decoder(Work)


SucceededFrames = Mapping[UUID, Sequence[TokenRange]]
"""By the worker that reports them."""
EndsByWorker = Mapping[UUID | None, Sequence[AttemptResult]]
"""By the worker that reports them; None: wherever they run (worker lost, or cancelled)."""


class EndedAttempt(NamedTuple):
    """An attempt that is being ended, with its frame."""

    end: AttemptResult
    worker: UUID
    show: ShowId
    job: JobId
    layer: LayerId
    frame: int
    attempt: int


class Successes(NamedTuple):
    """Frames that succeeded, of any workers: either none of them has a result, or all have."""

    runs: SucceededFrames
    took_ms: int
    results: Mapping[tuple[UUID, int], AttemptResult]
    """By worker and token."""

    @classmethod
    def without_results(cls, runs: SucceededFrames, took_ms: int) -> Successes:
        return cls(runs, took_ms, {})

    @classmethod
    def with_results(cls, results: Mapping[UUID, Sequence[AttemptResult]]) -> Successes:
        """The duration of each is stored with its result."""
        runs = {worker: to_ranges(end.token for end in each) for worker, each in results.items()}
        return cls(runs, 0, {(worker, end.token): end for worker, each in results.items() for end in each})

    def restrict(self, tokens: set[int], took_ms: int) -> Successes:
        held = {worker: to_ranges(tokens.intersection(iterate_tokens(each))) for worker, each in self.runs.items()}
        return Successes({worker: each for worker, each in held.items() if each}, took_ms, self.results)

    def tokens(self) -> Iterator[int]:
        return (token for ranges in self.runs.values() for token in iterate_tokens(ranges))


class DispatchFailures(NamedTuple):
    """Dispatch failures of a job so far, and the delay for its frames of this batch."""

    failures: int
    pause_s: float


class Finisher:
    def __init__(
        self,
        database: Database,
        queue: Queue,
        publisher: CompletionPublisher,
        canceller: JobCanceller,
        outputs: SyncOutputChecker | None = None,
        pace: SchedulerSettings | None = None,
    ) -> None:
        self.database = database
        self.queue = queue
        self.publisher = publisher
        self.outputs = outputs
        """Checks outputs; None: no output policy."""
        self._accounting = publisher.accounting
        self._locked_shows = self._accounting.locked_shows
        self.canceller = canceller
        self._decision_store = DecisionStore(database)
        self._pace = pace = pace or SchedulerSettings()
        self._dispatch_pauses = DispatchBackoff(pace.backoff_base, pace.backoff_max, pace.backoff_jitter)

    async def finish_succeeded(self, runs: SucceededFrames, took_ms: int = 0) -> CompletionResult:
        """End frames that succeeded without output, except `locked` ones."""
        return await self._finish_successes(Successes.without_results(runs, took_ms))

    def is_plain_result(self, end: AttemptResult) -> bool:
        """Whether this is the result of a success that nothing checks, so that `finish_results` may end it."""
        if end.status is not AttemptStatus.SUCCEEDED or end.artifacts or end.error:
            return False
        return _has_output(end) and (self.outputs is None or self.outputs.policy() is None)

    async def finish_results(self, results: Mapping[UUID, Sequence[AttemptResult]]) -> CompletionResult:
        """End frames that succeeded with a plain result each, by worker, in one statement, except `locked` ones."""
        return await self._finish_successes(Successes.with_results(results))

    async def _finish_successes(self, successes: Successes) -> CompletionResult:
        if not self._locked_shows:
            with suppress(PostgresBusy):
                return await self._finish_succeeded(successes)
        took = iter([successes.took_ms])  # counted once

        async def finish(tokens: set[int]) -> CompletionResult:
            return await self._finish_succeeded(successes.restrict(tokens, next(took, 0)))

        return await self._finish_by_show(list(successes.tokens()), finish)

    async def finish_attempts(self, ends: EndsByWorker) -> CompletionResult:
        """End attempts that carry a result, except `locked` ones."""
        if not self._locked_shows:
            with suppress(PostgresBusy):
                return await self._finish_attempts(ends)

        async def finish(tokens: set[int]) -> CompletionResult:
            return await self._finish_attempts(
                {worker: [end for end in each if end.token in tokens] for worker, each in ends.items()}
            )

        return await self._finish_by_show([end.token for each in ends.values() for end in each], finish)

    async def _finish_by_show(
        self, tokens: Sequence[int], finish: Callable[[set[int]], Awaitable[CompletionResult]]
    ) -> CompletionResult:
        """One transaction per show, so that frames of other shows do not wait for those of a locked one."""
        total = CompletionResult()
        by_show: dict[ShowId, list[int]] = defaultdict(list)
        for row in await self.database.rows(BOOKED_FRAMES, list(tokens)):
            by_show[row["pk_show"]].append(row["token"])
        total.late = len(tokens) - sum(map(len, by_show.values()))
        for show, held in sorted(by_show.items()):
            if self._locked_shows.blocks(show):
                total.locked += held
                continue
            try:
                with self._locked_shows.attempt(show):
                    total.add(await finish(set(held)))
            except PostgresBusy:
                total.locked += held
        return total

    async def _finish_succeeded(self, successes: Successes) -> CompletionResult:
        failpoints.hit("finish.before_success")
        with self._report_unknown_commit(lambda: sorted(set(successes.tokens()))):
            result = await self._write_successes(successes)
            failpoints.after_send("finish.success")
        if result is None:
            return await self._finish_each(successes)
        await self._after_commit(result)
        return result

    async def _finish_each(self, successes: Successes) -> CompletionResult:
        """One transaction per worker: a false report of one does not affect the frames of others. If PostgreSQL becomes
        unavailable, the rest counts as locked, so that what has ended is not forgotten."""
        total, left, took_ms = CompletionResult(), dict(successes.runs), successes.took_ms
        for worker, ranges in successes.runs.items():
            try:
                total.add(await self._finish_succeeded(Successes({worker: ranges}, took_ms, successes.results)))
            except PostgresUnavailable:
                if len(left) == len(successes.runs):
                    raise
                total.locked += [token for each in left.values() for token in iterate_tokens(each)]
                break
            del left[worker]
            took_ms = 0
        return total

    async def _finish_attempts(self, ends: EndsByWorker) -> CompletionResult:
        with self._report_unknown_commit(lambda: [end.token for each in ends.values() for end in each]):
            async with self.database.transaction(lock_s=LOCK_WAIT_S) as tx:
                result = await self._write_ends(tx, ends)
                failpoints.hit("finish.before_commit")
            failpoints.after_send("finish.ended")
        await self._after_commit(result)
        return result

    def reruns_lost(self, work: Work) -> bool:
        """Whether a frame of this work runs again if its worker is lost."""
        return self._losses_max(work) > 0

    def _losses_max(self, work: Work) -> int:
        return self._pace.max_worker_losses if work.retries.lost < 0 else work.retries.lost

    async def fail_unplaceable(self, claims: Sequence[Claim], reason: str) -> CompletionResult:
        """Fail and dead-letter claimed frames that were not booked and that no worker can ever run."""
        pieces = [piece for claim in claims for piece in claim.ranges()]
        failures = [FrameFailure(token, reason) for piece in pieces for token in piece.tokens]
        result = CompletionResult()
        async with self.database.transaction() as tx:
            ended = await self.queue.fail(failures, on=tx)
            failed = [failure.token for failure in failures if failure.token not in ended.refused]
            await self.queue.failed.move_to_dead_letters(FailedFilter(tokens=failed), on=tx)
            numbers = [sum(token not in ended.refused for token in piece.tokens) for piece in pieces]
            jobs = await tx.value(COUNT_ENDS, [piece.layer for piece in pieces], numbers, "FAILED", 0)
            result.finished = await finish_jobs(tx, jobs, reason)
        shows = {end.job: end.show for end in result.finished}
        result.letters = [
            DeadLetterNotice(reason, shows.get(job), job) for job in dict.fromkeys(piece.job for piece in pieces)
        ]
        await self._after_commit(result)
        return result

    @contextmanager
    def _report_unknown_commit(self, tokens: Callable[[], Sequence[int]]) -> Iterator[None]:
        """If the reply of the commit is lost, hand the tokens to accounting, which resolves the unknown outcome."""
        try:
            yield
        except (PostgresUnavailable, failpoints.LostReply) as error:
            if getattr(error, "facts", {}).get("outcome", "unknown") == "unknown":
                self._accounting.add_unknown_commit(tokens())
            raise

    async def _after_commit(self, result: CompletionResult) -> None:
        if result.scans and self.outputs is not None:
            self.outputs.due.set()
        await self.publisher.publish(result)
        for job in result.failing:
            with suppress(RotaError):  # the leader also does it shortly after
                await self.canceller.finish_termination(job)

    async def _write_successes(self, successes: Successes) -> CompletionResult | None:
        """None: two workers report the same frame, so nothing was done; never None for one worker."""
        result = CompletionResult()
        rows = await self._succeed(successes)
        while not _is_done(rows):
            if _overlap(successes.runs):
                return None
            asked = _count_frames(successes.runs)
            successes = successes.restrict(set(rows[0]["tokens"]), successes.took_ms)
            left = _count_frames(successes.runs)
            result.late += asked - left
            # The duration of late frames is not counted.
            successes = successes._replace(took_ms=successes.took_ms * left // asked)
            rows = await self._succeed(successes) if successes.runs else []
        _read_success_rows(rows, result)
        result.freed = {worker: list(ranges) for worker, ranges in successes.runs.items()}
        return result

    async def _succeed(self, successes: Successes) -> list[Record]:
        pieces = sorted((each, worker) for worker, ranges in successes.runs.items() for each in ranges)
        ranges = [each for each, _ in pieces]
        ids, masks = masks_of(expand_ranges(ranges))
        workers = [worker for _, worker in pieces]
        arguments = (workers, ids, masks, *span_columns(ranges), successes.took_ms)
        if not successes.results:
            return await self.database.rows(SUCCEED, *arguments)
        ends = [successes.results[worker, token] for each, worker in pieces for token in tokens_in_range(each)]
        return await self.database.rows(
            SUCCEED_WITH_RESULTS,
            *arguments,
            [end.token for end in ends],
            [end.value for end in ends],
            [end.pointer for end in ends],
            [min(end.took_ms, TOOK_MS_MAX) for end in ends],
        )

    async def _write_ends(self, tx: Transaction, ends: EndsByWorker) -> CompletionResult:
        result = CompletionResult()
        frames = await self._load_attempts(tx, ends)
        result.late += sum(map(len, ends.values())) - len(frames)
        if not frames:
            return result
        outcomes = await self._decide_outcomes(tx, frames)
        frames = {token: _keep_output_of_success(frame, outcomes[token]) for token, frame in frames.items()}
        checked = CheckedFrames(frames, outcomes, {})
        if self.outputs is not None:
            checked = await self.outputs.check(tx, checked)
        frames, outcomes = checked.frames, checked.endings
        late = await self._close_in_queue(tx, frames, outcomes)
        result.late += len(late)
        await self._delete_procs(tx, frames, result)
        accepted = {token: frame for token, frame in frames.items() if token not in late}
        await self._store_ends(tx, accepted, checked)
        if self.outputs is not None:
            result.scans = await self.outputs.add_scans(tx, accepted, checked)
        await self._count_ends(tx, accepted, outcomes, result)
        result.letters = [
            DeadLetterNotice(outcomes[token].reason, frame.show, frame.job)
            for token, frame in accepted.items()
            if outcomes[token].state in FAILED_STATES and outcomes[token].reason in DEAD_LETTER_REASONS
        ]
        result.letters += await self._quarantine_outputs(tx, accepted, checked)
        return result

    async def _quarantine_outputs(
        self, tx: Transaction, frames: Mapping[int, EndedAttempt], checked: CheckedFrames
    ) -> list[DeadLetterNotice]:
        stored = await self.outputs.quarantine(tx, frames, checked) if self.outputs is not None else []
        if stored:
            await self.queue.dead_letters.add(sync_check.output_dead_letters(stored, Reason.OUTPUT_QUARANTINED), on=tx)
            await sync_check.audit_state_changes(tx, stored, "sync")
            sync_check.count_quarantined(stored, "sync")
        return [DeadLetterNotice(Reason.OUTPUT_QUARANTINED.value, one.show, one.job, "output") for one in stored]

    async def _load_attempts(self, tx: Transaction, ends: EndsByWorker) -> dict[int, EndedAttempt]:
        """Those of the attempts that are booked on the worker that they are reported by."""
        reported = {(worker, end.token): end for worker, each in ends.items() for end in each}
        rows = await tx.rows(BOOKED_FRAMES, list({token for _, token in reported}))
        booked: dict[int, tuple[Record, AttemptResult]] = {}
        for row in rows:
            end = reported.get((row["pk_host"], row["token"])) or reported.get((None, row["token"]))
            if end is not None:
                booked[row["token"]] = (row, end)
        attempts = await self.queue.lookup_tokens(booked, on=tx)
        return {
            token: EndedAttempt(
                end, row["pk_host"], row["pk_show"], row["pk_job"], row["pk_layer"], *attempts.get(token, (0, 1))
            )
            for token, (row, end) in booked.items()
        }

    async def _decide_outcomes(self, tx: Transaction, frames: Mapping[int, EndedAttempt]) -> dict[int, AttemptOutcome]:
        layers = {row["pk_layer"]: row for row in await tx.rows(LAYERS, list({f.layer for f in frames.values()}))}
        refused = [
            frame
            for frame in frames.values()
            if frame.end.status is AttemptStatus.REFUSED and frame.end.code not in SERIES_STATES
        ]
        undispatched = await self._count_dispatch_failures(tx, refused)
        decisions = await self._decision_store.read({row["word"] for row in layers.values()}, on=tx)
        again = [frame for frame in frames.values() if frame.attempt > 1]
        before = await self._past_failures(tx, again) if again else {}
        return {
            token: self._decide_outcome(
                frame,
                layers.get(frame.layer),
                undispatched,
                before.get((frame.layer, frame.frame), (0, 0)),
                _budgets(layers.get(frame.layer), decisions),
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
            return AttemptOutcome("FAILED", AttemptCode.ARTIFACT_LIMIT) if too_much else AttemptOutcome("SUCCEEDED", "")
        if ends_as is not None:
            return AttemptOutcome(ends_as, known_code(end))
        assert layer is not None
        if end.status is AttemptStatus.REFUSED and end.code in SERIES_STATES:
            return AttemptOutcome(SERIES_STATES[AttemptCode(end.code)], end.code)
        if end.status is AttemptStatus.REFUSED:
            failures = undispatched.get(frame.job) or self._dispatch_failures(1)
            if failures.failures >= self._pace.max_scheduling_retries:
                return AttemptOutcome("FAILED", Reason.DISPATCH_FAILED.value)
            return AttemptOutcome("RETURNED", known_code(end), failures.pause_s)
        if end.status is AttemptStatus.CANCELLED:
            return AttemptOutcome("CANCELLED", known_code(end))
        work, (failed, lost) = _WORK.decode(layer["work"]), before
        retries = work.retries
        if end.code == WORKER_LOST:
            outcome = decide_retry_after_loss(end.token, lost, self._losses_max(work))
        else:
            outcome = decide_retry(end, retries, failed)
        if outcome.state == "RETRIED" and 0 <= budgets.max_retries <= failed + lost:
            state = "TIMEOUT" if end.status is AttemptStatus.TIMEOUT else "FAILED"
            outcome = AttemptOutcome(state, Reason.MAX_RETRIES_EXCEEDED.value)
        return outcome._replace(ends_job=work.fail_fast and outcome.state in FAILED_STATES)

    async def _count_dispatch_failures(
        self, tx: Transaction, refused: Sequence[EndedAttempt]
    ) -> dict[UUID, DispatchFailures]:
        if not refused:
            return {}
        code = known_code(refused[0].end)
        jobs = sorted({frame.job for frame in refused})
        pace = self._pace
        rows = await tx.rows(
            DISPATCH_FAILED, jobs, code, pace.backoff_base, pace.backoff_max, pace.max_scheduling_retries
        )
        return {row["pk_job"]: self._dispatch_failures(row["dispatch_failures"]) for row in rows}

    def _dispatch_failures(self, failures: int) -> DispatchFailures:
        return DispatchFailures(failures, self._dispatch_pauses.pause_s(failures - 1, jitter()))

    async def _past_failures(
        self, tx: Transaction, frames: Sequence[EndedAttempt]
    ) -> dict[tuple[UUID, int], tuple[int, int]]:
        rows = await tx.rows(FAILURES, [frame.layer for frame in frames], [frame.frame for frame in frames])
        return {(row["pk_layer"], row["frame"]): (row["failed"], row["lost"]) for row in rows}

    async def _close_in_queue(
        self, tx: Transaction, frames: Mapping[int, EndedAttempt], outcomes: Mapping[int, AttemptOutcome]
    ) -> frozenset[int]:
        """Close the attempts in the queue; returns the tokens that had ended before."""
        late: set[int] = set()
        by_outcome: dict[tuple[str, float], list[int]] = defaultdict(list)
        for token, outcome in outcomes.items():
            by_outcome[outcome.state, outcome.delay_s].append(token)
        if len(by_outcome) > 1:
            await self.queue.lock_claims(outcomes, on=tx)
        for (state, delay_s), tokens in sorted(by_outcome.items()):
            match state:
                case "SUCCEEDED" | "OUTPUT_QUARANTINED":
                    ended = await self.queue.complete(tokens, on=tx)
                case "RETRIED" | "RERUN":
                    ended = await self.queue.retry(tokens, delay_s, on=tx)
                case "RETURNED":
                    ended = await self.queue.defer(tokens, delay_s, on=tx)
                case "HANDED_BACK":
                    ended = await self.queue.give_back(tokens, on=tx)
                    await self._announce(tx, {frames[token].layer for token in tokens})
                case "FAILED" | "TIMEOUT":
                    why = {token: outcomes[token].reason for token in tokens}
                    failures = [FrameFailure(token, why[token], frames[token].end.error or None) for token in tokens]
                    ended = await self.queue.fail(failures, on=tx)
                    dead = [t for t in tokens if why[t] in DEAD_LETTER_REASONS and t not in ended.refused]
                    if dead:
                        await self.queue.failed.move_to_dead_letters(FailedFilter(tokens=dead), on=tx)
                case _:
                    ended = await self.queue.cancel_running(tokens, on=tx)
            late |= ended.refused
        return frozenset(late)

    async def _announce(self, tx: Transaction, layers: set[LayerId]) -> None:
        """Notify dispatchers of frames that can be claimed again."""
        for row in await tx.rows(QUEUES_OF_LAYERS, list(layers)):
            await tx.run(NOTIFY_QUEUE, row["queue"])

    async def _delete_procs(
        self, tx: Transaction, frames: Mapping[int, EndedAttempt], result: CompletionResult
    ) -> None:
        by_show: dict[ShowId, list[int]] = defaultdict(list)
        for token, frame in frames.items():
            by_show[frame.show].append(token)
        for show in sorted(by_show):
            result.released[show] = await allocations.delete(tx, show, by_show[show])
        result.freed = _by_worker((frame.worker, token) for token, frame in frames.items())

    async def _store_ends(self, tx: Transaction, frames: Mapping[int, EndedAttempt], checked: CheckedFrames) -> None:
        """Store outputs and failed attempts; a success without output stores nothing."""
        outcomes = checked.endings
        stored = [
            (frame, outcomes[token])
            for token, frame in frames.items()
            if outcomes[token].state not in UNUSED_STATES
            and (outcomes[token].state != "SUCCEEDED" or _has_output(frame.end))
        ]
        if not stored:
            return
        artifact_lines = await _store_artifacts(tx, [frame.end.artifacts for frame, _ in stored])
        await tx.run(
            ADD_ENDS,
            [frame.layer for frame, _ in stored],
            [frame.frame for frame, _ in stored],
            [frame.attempt for frame, _ in stored],
            [frame.end.token for frame, _ in stored],
            [outcome.state for _, outcome in stored],
            [frame.end.value for frame, _ in stored],
            [frame.end.pointer for frame, _ in stored],
            [outcome.reason or None for _, outcome in stored],
            [frame.end.error.replace("\0", "") or None for frame, _ in stored],
            [min(frame.end.took_ms, TOOK_MS_MAX) for frame, _ in stored],
            [frame.worker for frame, _ in stored],
            artifact_lines,
            *sync_check.frame_end_columns(checked, [frame.end.token for frame, _ in stored]),
        )

    async def _count_ends(
        self,
        tx: Transaction,
        frames: Mapping[int, EndedAttempt],
        outcomes: Mapping[int, AttemptOutcome],
        result: CompletionResult,
    ) -> None:
        counted: dict[str, dict[LayerId, int]] = defaultdict(lambda: defaultdict(int))
        for token, frame in frames.items():
            if outcomes[token].state in UNUSED_STATES or outcomes[token].state == "RETRIED":
                RETRIED.labels(outcomes[token].reason).inc()
            else:
                counted[outcomes[token].state][frame.layer] += 1
        jobs: set[UUID] = set()
        for state, layers in sorted(counted.items()):
            jobs |= set(await tx.value(COUNT_ENDS, list(layers), list(layers.values()), state, 0))
        if jobs:
            result.finished = await finish_jobs(tx, jobs)
        failing = {frame.job: outcomes[token].state for token, frame in frames.items() if outcomes[token].ends_job}
        for job in sorted(failing.keys() - {end.job for end in result.finished}):
            await tx.row(END_AS, job, failing[job], Reason.FRAME_FAILED.value)
            result.failing.append(job)


def _has_output(end: AttemptResult) -> bool:
    return end.value is not None or end.pointer is not None or bool(end.artifacts)


async def _store_artifacts(tx: Transaction, by_frame: Sequence[tuple[Artifact, ...]]) -> list[str]:
    """Artifact lines per frame, for the column; inline artifacts are written to the blob store."""
    inline = [each.data for artifacts in by_frame for each in artifacts if not each.pointer]
    if inline:
        await tx.run(PUT, *put_arguments(inline)[1])
    return [
        "\n".join(
            format_artifact(each.pointer or str(pointer_to(each.data, BlobLocation.POSTGRES)), each.name)
            for each in artifacts
        )
        for artifacts in by_frame
    ]


def _is_done(rows: Sequence[Record]) -> bool:
    """False: some of the frames are not booked where they were reported, and nothing was done."""
    return not rows or rows[0]["what"] != "not_held"


def _by_worker(tokens: Iterable[tuple[UUID, int]]) -> dict[UUID, list[TokenRange]]:
    found: dict[UUID, list[int]] = defaultdict(list)
    for worker, token in tokens:
        found[worker].append(token)
    return {worker: to_ranges(each) for worker, each in found.items()}


def _count_frames(runs: SucceededFrames) -> int:
    return sum(map(count_tokens, runs.values()))


def _overlap(runs: SucceededFrames) -> bool:
    """Whether two workers report the same frame: it is booked on one of them, and the other's report is false."""
    pieces = sorted((first, n, worker) for worker, ranges in runs.items() for first, n in ranges)
    end, last = 0, None
    for first, n, worker in pieces:
        if first < end and worker != last:
            return True
        end, last = max(end, first + n), worker
    return False


def _read_success_rows(rows: Sequence[Record], result: CompletionResult) -> None:
    for row in rows:
        match row["what"]:
            case "refused":
                result.late += len(tokens_in(row["claim_id"], row["refused"]))
            case "finished":
                show, topic, state, workflow = (
                    ShowId(row["pk_show"]),
                    row["topic"],
                    JobState(row["state"]),
                    row["workflow_id"],
                )
                result.finished += [JobEnd(job, show, topic, state, workflow) for job in row["jobs"]]
            case what:
                _read_released(row, result, single=what == "singles")


def _read_released(row: Record, result: CompletionResult, *, single: bool) -> None:
    """Procs of one layer; or of many jobs that differ only in their ids, one token each."""
    alloc, folder, dept, cores, gpus = (row[name] for name in ("pk_alloc", "pk_folder", "pk_dept", "cores", "gpus"))
    jobs, layers, tokens = row["jobs"], row["layers"], row["tokens"]
    show = ShowId(row["pk_show"])
    before = result.released.get(show) or ProcDeleteResult([], row["managed"], row["fence"])
    released, swarms = before.released, before.swarms
    if single:
        charge = Charge(alloc, folder, JobId(NIL_UUID), LayerId(NIL_UUID), dept, cores, gpus)
        swarms = [*swarms, SingleFrameBatch(charge, NIL_UUID, tokens, jobs, layers)]
    else:
        released = [*released, ReleasedTokens(Charge(alloc, folder, jobs[0], layers[0], dept, cores, gpus), tokens)]
    result.released[show] = ProcDeleteResult(released, row["managed"], row["fence"], swarms)


def _budgets(layer: Record | None, decisions: Mapping[int, PolicyDecision]) -> PolicyBudgets:
    decision = decisions.get(layer["word"]) if layer is not None else None
    return budgets_of(decision.constraints if decision is not None else None)


def _keep_output_of_success(frame: EndedAttempt, outcome: AttemptOutcome) -> EndedAttempt:
    """Drop the output of an attempt that did not succeed, or that exceeds the artifact limit of its policy.

    Only outputs of successful attempts are scanned, so no other may be stored, whatever a worker reports.
    """
    if outcome.state == "SUCCEEDED":
        return frame
    end = msgspec.structs.replace(frame.end, artifacts=(), value=None, pointer=None)
    if outcome.reason == AttemptCode.ARTIFACT_LIMIT:
        error = "Its artifacts exceed the size limit of its policy: store less, or raise max_artifact_bytes."
        end = msgspec.structs.replace(end, error=error)
    return frame._replace(end=end)
