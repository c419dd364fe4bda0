"""Results of frames, kept until the result stream has stored them.

Results are published in batches: immediately on an idle worker, otherwise when `BATCH_ENDS_MAX` are waiting or
`BATCH_WAIT_S` after one of them is `due`, because it frees a slot. Those of a series free none before its last one, so
they are not due for `SERIES_WAIT_S`: a transaction for every few of them costs PostgreSQL far more than their ends.
Invariants, enforced here:

- a token is in `unconfirmed_tokens` until its report is stored, and `reported` is raised before it leaves: a heartbeat
  that reads the tokens first and `reported` second never shows a gap;
- one report is in flight at a time, under a message id. It is republished under that id until confirmed, however long
  NATS is unavailable. A duplicate is harmless: servers refuse a token that has ended;
- the backlog is bounded: beyond `BACKLOG_ENDS_MAX` or `BACKLOG_BYTES_MAX` the session accepts no new frames
  (`wait_for_capacity`).

After a crash, results not stored are lost and servers requeue those frames.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import suppress
from random import SystemRandom
from typing import Final
from uuid import UUID

import msgspec
import structlog

from rota.infra import failpoints
from rota.infra.nats import Bus, BusMessage, PublishOutcome, PublishReceipt
from rota.infra.telemetry import metrics
from rota.model.attempt_codes import AttemptCode
from rota.model.backoff import Backoff
from rota.model.errors import NatsUnavailable
from rota.model.protocol import RESULT_SUBJECT, AttemptResult, AttemptStatus, Report, encode
from rota.model.token_ranges import TokenRange, count_tokens

log = structlog.get_logger(__name__)
FRAMES_REPORTED = metrics.counter(
    "rota_worker_frames", "Frames that ended on this worker, by status.", labels=("status",)
)
ENDS_DROPPED = metrics.counter("rota_worker_reports_dropped", "Results dropped because NATS rejects them in any form.")

BATCH_ENDS_MAX: Final = 256
BATCH_WAIT_S: Final = 0.003
SERIES_WAIT_S: Final = 0.02
REPORT_BYTES_MAX: Final = 256 * 1024
BACKLOG_ENDS_MAX: Final = 20_000
BACKLOG_BYTES_MAX: Final = 64 * 1024 * 1024
PUBLISH_BACKOFF = Backoff(first_s=0.05, longest_s=2.0)
_jitter = SystemRandom().random


class ResultReporter:
    def __init__(self, bus: Bus, worker: UUID, is_busy: Callable[[], bool]) -> None:
        self.reported = 0
        """Stream sequence of the last stored report."""
        self._bus = bus
        self._worker = worker
        self._is_busy = is_busy
        self._numbers = itertools.count(1)
        self._done: list[TokenRange] = []
        self._duration_ms = 0.0
        self._ends: list[AttemptResult] = []
        self._durations: dict[int, tuple[int, float, float]] = {}
        """By timing key: frames that ended, and for how many seconds they ran and kept their slots in total."""
        self._in_flight: tuple[TokenRange, ...] = ()
        self._count = 0
        self._bytes = 0
        self._not_empty = asyncio.Event()
        self._due = asyncio.Event()
        self._full = asyncio.Event()
        self._backlog_changed = asyncio.Condition()

    def add_succeeded(self, first: int, n: int, took_s: float) -> None:
        """Adds frames that succeeded without a result."""
        ranges = self._done
        # Extended in place: most frames end in the order of their tokens, and merging later would sort them all.
        if ranges and ranges[-1][0] + ranges[-1][1] == first:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + n)
        else:
            ranges.append((first, n))
        self._duration_ms += took_s * 1000
        self._on_added(n)

    def add_end(self, end: AttemptResult) -> None:
        """Adds a frame that failed or returned a result."""
        self._ends.append(end)
        self._bytes += _estimated_bytes(end)
        self._on_added(1)

    def set_due(self) -> None:
        """Publish what was added shortly."""
        self._due.set()

    def add_duration(self, timing_key: int, frames: int, run_s: float, slot_s: float) -> None:
        """Adds how long frames ran, and kept their slots, in total; it goes with the next report."""
        known, total_run_s, total_slot_s = self._durations.get(timing_key, (0, 0.0, 0.0))
        self._durations[timing_key] = (known + frames, total_run_s + run_s, total_slot_s + slot_s)

    def unconfirmed_tokens(self) -> list[TokenRange]:
        """Tokens whose reports are not confirmed. Thread-safe: each part is copied in one step."""
        ends = tuple(self._ends)
        return [*self._done, *self._in_flight, *((end.token, 1) for end in ends)]

    async def run(self) -> None:
        """Publishes results until cancelled."""
        while True:
            await self._not_empty.wait()
            await self._wait_for_batch()
            while report := self._next_report():
                await self._store(report)
                if not self._is_full:
                    break

    async def wait_for_capacity(self) -> None:
        """Waits until the backlog is below its limits."""
        async with self._backlog_changed:
            await self._backlog_changed.wait_for(
                lambda: self._count < BACKLOG_ENDS_MAX and self._bytes < BACKLOG_BYTES_MAX
            )

    async def wait_until_stored(self, timeout_s: float) -> bool:
        """Whether all results were stored within `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._backlog_changed:
                await self._backlog_changed.wait_for(lambda: not self._count)
        return not self._count

    @property
    def _is_full(self) -> bool:
        return self._count >= BATCH_ENDS_MAX or self._bytes >= REPORT_BYTES_MAX

    def _on_added(self, n: int) -> None:
        self._count += n
        self._not_empty.set()
        if self._is_full:
            self._due.set()
            self._full.set()

    async def _wait_for_batch(self) -> None:
        if self._is_busy():
            await _wait(self._due, SERIES_WAIT_S - BATCH_WAIT_S)
        if self._is_busy():
            await _wait(self._full, BATCH_WAIT_S)

    def _next_report(self) -> Report | None:
        """The next report. Its tokens are in `_in_flight` before they leave `_done` and `_ends`."""
        ends: list[AttemptResult] = []
        size = 0
        for end in self._ends:
            size += _estimated_bytes(end)
            if ends and size > REPORT_BYTES_MAX:
                break
            ends.append(end)
        done, duration_ms = self._done, round(self._duration_ms)
        self._in_flight = (*done, *((end.token, 1) for end in ends))
        del self._ends[: len(ends)]
        self._done, self._duration_ms = [], 0.0
        if not self._ends:
            self._not_empty.clear()
        self._due.clear()
        self._full.clear()
        if not self._in_flight:
            return None
        durations, self._durations = self._durations, {}
        timings = [(key, n, round(run_s * 1e6), round(slot_s * 1e6)) for key, (n, run_s, slot_s) in durations.items()]
        return Report(self._worker, done, ends, duration_ms, timings)

    async def _store(self, report: Report) -> None:
        receipt = await self._publish(report)
        if receipt.outcome is PublishOutcome.REJECTED:
            await self._store_split(report, receipt.reason)
        else:
            self.reported = receipt.stream_seq
        self._in_flight = ()
        self._count -= count_tokens(report.done) + len(report.ends)
        self._bytes -= sum(map(_estimated_bytes, report.ends))
        _count_reported(report)
        async with self._backlog_changed:
            self._backlog_changed.notify_all()

    async def _publish(self, report: Report) -> PublishReceipt:
        """Retries until the report is stored or rejected for good."""
        message = BusMessage(
            subject=RESULT_SUBJECT, data=encode(report), msg_id=f"{self._worker.hex}:{next(self._numbers)}"
        )
        for streak in itertools.count(1):
            failpoints.hit("worker.before_report")
            with suppress(NatsUnavailable, failpoints.LostReply):
                (receipt,) = await self._bus.publish_many([message])
                failpoints.after_send("worker.report")
                if receipt.outcome is not PublishOutcome.UNSETTLED:
                    return receipt
            if streak == 1:
                log.warning("report_publish_retrying", frames=count_tokens(report.done) + len(report.ends))
            pause_s = PUBLISH_BACKOFF.pause_s(streak, _jitter())
            await (asyncio.sleep(pause_s) if self._bus.connected else self._bus.until_connected(pause_s))
        raise AssertionError("endless")

    async def _store_split(self, report: Report, reason: str) -> None:
        """Publishes the parts of a rejected report: the server's message limit is lower than expected."""
        if report.done:
            await self._publish_or_drop(msgspec.structs.replace(report, ends=[]), reason)
        for end in report.ends:
            single = Report(self._worker, ends=[end])
            receipt = await self._publish(single)
            if receipt.outcome is PublishOutcome.REJECTED:
                refused = AttemptResult(
                    end.token,
                    AttemptStatus.FAILED,
                    code=AttemptCode.RESULT_TOO_LARGE,
                    error=f"NATS rejects the result: {reason}.",
                )
                await self._publish_or_drop(msgspec.structs.replace(single, ends=[refused]), reason)
            else:
                self.reported = receipt.stream_seq

    async def _publish_or_drop(self, report: Report, reason: str) -> None:
        receipt = await self._publish(report)
        if receipt.outcome is PublishOutcome.REJECTED:
            ENDS_DROPPED.inc(len(report.ends) + count_tokens(report.done))
            log.critical("report_dropped", reason=reason, frames=len(report.ends))
        else:
            self.reported = receipt.stream_seq


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    if not event.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await event.wait()


def _estimated_bytes(end: AttemptResult) -> int:
    return 64 + len(end.value or b"") + len(end.error) + sum(100 + len(each.data) for each in end.artifacts)


def _count_reported(report: Report) -> None:
    if report.done:
        FRAMES_REPORTED.labels(AttemptStatus.SUCCEEDED.value).inc(count_tokens(report.done))
    for end in report.ends:
        FRAMES_REPORTED.labels(end.status.value).inc()
