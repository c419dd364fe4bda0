"""Worker reports: results of attempts from the stream, and started frames.

Reports are handled in batches, those of many workers in one transaction per kind. There is no deduplication table: a
redelivered report finds its attempts ended and changes nothing (J3). It is acknowledged after the commit, so a report
is lost only together with the whole stream; recovery then finds frames that their worker neither holds nor has
reported. A report with frames of a locked show is redelivered; its other frames have ended.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import Final
from uuid import UUID

import structlog

from rota.engine.completion.finisher import Finisher
from rota.engine.completion.publisher import CompletionResult
from rota.engine.dispatch.series import WorkDurations
from rota.engine.dispatch.state_writer import JobStateWriter
from rota.infra import failpoints
from rota.infra.nats import Acknowledgement, Bus, ConsumerSpec, CoreMessage, Delivery, Nak, Terminate
from rota.infra.postgres import Database, query
from rota.infra.service import Lifecycle
from rota.infra.telemetry import metrics
from rota.model.artifacts import ARTIFACTS_MAX, is_artifact_name
from rota.model.errors import InvalidInput, PostgresUnavailable
from rota.model.protocol import PROGRESS_SUBJECT, RESULT_SUBJECT, AttemptResult, Progress, Report, decode
from rota.model.token_ranges import TokenRange, count_tokens, iterate_tokens, split_ranges
from rota.queue.tokens import BATCH_MAX

JOBS_OF_TOKENS = query(__package__, "jobs_of_tokens")

log = structlog.get_logger(__name__)
CONSUMER_SPEC: Final = ConsumerSpec(stream="SYS", durable="results", filter=RESULT_SUBJECT, ack_wait_s=3.0)
STARTED_MAX: Final = 10_000
TIMINGS_MAX: Final = 65_536
ENDS_MAX: Final = 1000
RANGE_TOKENS_MAX: Final = 65_536
TOKENS_MAX: Final = 1 << 20
"""Frames per message: a short message can name more than fit into memory, so ranges are checked before expansion."""
CODE_MAX: Final = 100
LONGEST_MS: Final = 30 * 86_400_000
"""Duration of one frame that is believed."""

INVALID_MESSAGES = metrics.counter("rota_validation_rejections", "Invalid messages, by kind.", labels=("kind",))
REPORT_FRAMES = metrics.histogram(
    "rota_report_frames", "Frames ended by one transaction.", buckets=(1, 4, 16, 64, 256, 512, 1024, 2048, 4096)
)

OnCompletion = Callable[[CompletionResult], None]
"""Called after the commit."""


class SucceededRanges:
    """What one worker has reported as succeeded in a batch of messages."""

    __slots__ = ("frames", "ranges", "took_ms")

    def __init__(self) -> None:
        self.ranges: list[TokenRange] = []
        self.frames = 0
        self.took_ms = 0

    def add(self, ranges: Iterable[TokenRange], frames: int, took_ms: int) -> None:
        self.ranges += ranges
        self.frames += frames
        self.took_ms += min(took_ms, frames * LONGEST_MS)


class ReportConsumer:
    def __init__(self, finisher: Finisher, on_completion: OnCompletion, durations: WorkDurations) -> None:
        self.finisher = finisher
        self.durations = durations
        self._on_completion = on_completion

    async def handle(self, batch: Sequence[Delivery]) -> list[Acknowledgement]:
        succeeded: dict[UUID, SucceededRanges] = defaultdict(SucceededRanges)
        ends: dict[UUID, list[AttemptResult]] = defaultdict(list)
        acknowledgements: list[Acknowledgement] = []
        reports: list[Report | None] = []
        for delivery in batch:
            try:
                report = decode(Report, delivery.data)
                frames = _check_report(report)
            except InvalidInput as error:
                INVALID_MESSAGES.labels("report").inc()
                acknowledgements.append(Terminate(error.sentence))
                reports.append(None)
                continue
            if frames:
                succeeded[report.worker].add(report.done, frames, report.took_ms)
            if report.ends:
                ends[report.worker] += report.ends
            for timing_key, n, run_us, slot_us in report.timings:
                self.durations.record(timing_key, n, run_us / 1e6, slot_us / 1e6)
            acknowledgements.append(None)
            reports.append(report)
        locked = await self._finish_succeeded(succeeded)
        locked |= await self._finish_attempts(ends)
        failpoints.hit("results.after_commit_before_ack")
        if locked:
            acknowledgements = [
                Nak() if report is not None and _has_any(report, locked) else acknowledgement
                for report, acknowledgement in zip(reports, acknowledgements, strict=True)
            ]
        return acknowledgements

    async def _finish_succeeded(self, succeeded: Mapping[UUID, SucceededRanges]) -> set[int]:
        """Returns the tokens of locked shows, which have not ended."""
        locked: set[int] = set()
        for alike in _by_duration(succeeded):
            left_ms = sum(each.took_ms for each in alike.values())
            for part, frames in _batches(alike, BATCH_MAX):
                part_ms = min(left_ms, frames * LONGEST_MS)
                left_ms -= part_ms
                locked |= self._after_commit(await self.finisher.finish_succeeded(part, part_ms))
        return locked

    async def _finish_attempts(self, ends: Mapping[UUID, Sequence[AttemptResult]]) -> set[int]:
        """As `_finish_succeeded`."""
        locked: set[int] = set()
        reported = ((worker, end) for worker, each in ends.items() for end in each)
        while part := list(islice(reported, ENDS_MAX)):
            results: dict[UUID, list[AttemptResult]] = defaultdict(list)
            others: dict[UUID | None, list[AttemptResult]] = defaultdict(list)
            for worker, end in part:
                if self.finisher.is_plain_result(end):
                    results[worker].append(end)
                else:
                    others[worker].append(end)
            if results:
                locked |= self._after_commit(await self.finisher.finish_results(results))
            if others:
                locked |= self._after_commit(await self.finisher.finish_attempts(others))
        return locked

    def _after_commit(self, result: CompletionResult) -> set[int]:
        """Returns the tokens of locked shows."""
        REPORT_FRAMES.observe(sum(map(count_tokens, result.freed.values())))
        self._on_completion(result)
        return set(result.locked)


def _by_duration(succeeded: Mapping[UUID, SucceededRanges]) -> Iterable[Mapping[UUID, SucceededRanges]]:
    """The same by workers whose frames took about as long: the duration of a transaction is divided by frames."""
    groups: dict[int, dict[UUID, SucceededRanges]] = defaultdict(dict)
    for worker, each in succeeded.items():
        groups[(each.took_ms // each.frames).bit_length() // 3][worker] = each
    return groups.values()


def _batches(
    succeeded: Mapping[UUID, SucceededRanges], tokens_max: int
) -> Iterator[tuple[dict[UUID, list[TokenRange]], int]]:
    """The same ranges in batches of at most `tokens_max` tokens, with their number."""
    batch: dict[UUID, list[TokenRange]] = {}
    room = tokens_max
    for worker, each in succeeded.items():
        parts = [each.ranges] if each.frames <= tokens_max else split_ranges(each.ranges, tokens_max)
        for part in parts:
            frames = count_tokens(part)
            if frames > room:
                yield batch, tokens_max - room
                batch, room = {}, tokens_max
            batch.setdefault(worker, []).extend(part)
            room -= frames
    if batch:
        yield batch, tokens_max - room


def _has_any(report: Report, tokens: set[int]) -> bool:
    return any(end.token in tokens for end in report.ends) or any(
        not tokens.isdisjoint(range(first, first + n)) for first, n in report.done
    )


class ProgressConsumer:
    """Consumes started frames; each message goes to one replica."""

    def __init__(self, database: Database, bus: Bus, state_writer: JobStateWriter) -> None:
        self.database = database
        self.bus = bus
        self.state_writer = state_writer

    async def run(self, life: Lifecycle) -> None:
        async with self.bus.subscribe_core(PROGRESS_SUBJECT, group="rota-servers") as messages_in:
            life.ready()
            draining = asyncio.create_task(life.until_draining())
            try:
                while not life.draining:
                    await self._consume_batch(messages_in, draining)
            finally:
                draining.cancel()

    async def _consume_batch(self, messages_in: asyncio.Queue[CoreMessage], draining: asyncio.Task[None]) -> None:
        next_message = asyncio.create_task(messages_in.get())
        await asyncio.wait({next_message, draining}, return_when=asyncio.FIRST_COMPLETED)
        if not next_message.done():
            next_message.cancel()
            return
        messages = [next_message.result()]
        while not messages_in.empty():
            messages.append(messages_in.get_nowait())
        started = (token for message in messages for token in _started_tokens(message))
        tokens = list(islice(started, STARTED_MAX))
        if not tokens:
            return
        try:
            rows = await self.database.rows(JOBS_OF_TOKENS, tokens)
        except PostgresUnavailable:
            return
        self.state_writer.record_running(row["pk_job"] for row in rows)


def _started_tokens(message: CoreMessage) -> Iterator[int]:
    try:
        progress = decode(Progress, message.data)
        _check_ranges(progress.started)
    except InvalidInput:
        INVALID_MESSAGES.labels("progress").inc()
        return iter(())
    return iterate_tokens(progress.started)


def _check_report(report: Report) -> int:
    """Returns the number of frames that it reports as succeeded."""
    frames = _check_ranges(report.done)
    if any(not 0 <= end.token < 2**53 for end in report.ends):
        raise InvalidInput("A report names an invalid token.")
    if not 0 <= report.took_ms < 2**53 or any(map(_is_invalid_end, report.ends)):
        raise InvalidInput("A report contains an invalid duration or code.")
    if len(report.timings) > TIMINGS_MAX or any(min(each) < 0 or not each[1] for each in report.timings):
        raise InvalidInput("A report contains invalid timings.")
    runs = sorted([*report.done, *((end.token, 1) for end in report.ends)])
    if any(first + n > then for (first, n), (then, _) in pairwise(runs)):
        raise InvalidInput("A report ends a frame twice.")
    return frames


def _is_invalid_end(end: AttemptResult) -> bool:
    texts = (end.code, end.pointer or "")
    return (
        not 0 <= end.took_ms < 2**53
        or not 0 <= end.after_s < float("inf")
        or len(end.code) > CODE_MAX
        or any("\0" in text for text in texts)
        or len(end.artifacts) > ARTIFACTS_MAX
        or not all(is_artifact_name(each.name) and each.pointer.isprintable() for each in end.artifacts)
    )


def _check_ranges(runs: Sequence[TokenRange]) -> int:
    """Returns the number of tokens."""
    if any(first < 0 or not 0 < n <= RANGE_TOKENS_MAX or first + n > 2**53 for first, n in runs):
        raise InvalidInput("A report names an invalid token range.")
    if (frames := count_tokens(runs)) > TOKENS_MAX:
        raise InvalidInput(
            f"A report names {frames} frames, more than the limit of {TOKENS_MAX}: send several reports."
        )
    return frames
