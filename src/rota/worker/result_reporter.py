"""What ended here, until the bus has stored it.

Ends are gathered and published together: at once when nothing else is going on, else when `FULL` have come or after
`GATHER_S`. Invariants, kept here:

- an end is in `held` until its report is in the stream, and `reported` is raised before it leaves `held`: a heartbeat
  that reads `held` first and `reported` then never shows a gap;
- one report is in flight at a time, under an id that names it. While it is not confirmed it is published again under
  that id, however long NATS is away: stored twice it changes nothing, since servers refuse a token that has ended;
- what waits here is bounded: past `BACKLOG_ENDS` or `BACKLOG_BYTES` nobody takes new frames (`until_room`).

If we die, what was not stored is lost, and servers give those frames to somebody else.
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
from rota.model.backoff import Backoff
from rota.model.errors import NatsUnavailable
from rota.model.protocol import RESULT_SUBJECT, AttemptResult, AttemptStatus, Report, TokenRange, encode

log = structlog.get_logger(__name__)
FRAMES_REPORTED = metrics.counter(
    "rota_worker_frames", "Frames that ended on this worker, by status.", labels=("status",)
)
ENDS_DROPPED = metrics.counter("rota_worker_reports_dropped", "Ends that NATS refuses to store in any shape.")

BATCH_ENDS_MAX: Final = 256
BATCH_WAIT_S: Final = 0.003
REPORT_BYTES_MAX: Final = 256 * 1024
BACKLOG_ENDS_MAX: Final = 20_000
BACKLOG_BYTES_MAX: Final = 64 * 1024 * 1024
PUBLISH_BACKOFF = Backoff(first_s=0.05, longest_s=2.0)
_jitter = SystemRandom().random


class ResultReporter:
    def __init__(self, bus: Bus, worker: UUID, busy: Callable[[], bool]) -> None:
        self.reported = 0
        """Place of the last stored report in its stream."""
        self._bus = bus
        self._worker = worker
        self._busy = busy
        self._numbers = itertools.count(1)
        self._done: list[TokenRange] = []
        self._took_ms = 0.0
        self._ends: list[AttemptResult] = []
        self._flying: tuple[TokenRange, ...] = ()
        self._count = 0
        self._bytes = 0
        self._some = asyncio.Event()
        self._full = asyncio.Event()
        self._settled = asyncio.Condition()

    def add_succeeded(self, first: int, n: int, took_s: float) -> None:
        """Frames that succeeded and returned nothing."""
        runs = self._done
        if runs and runs[-1][0] + runs[-1][1] == first:
            runs[-1] = (runs[-1][0], runs[-1][1] + n)
        else:
            runs.append((first, n))
        self._took_ms += took_s * 1000
        self._on_added(n)

    def add_end(self, end: AttemptResult) -> None:
        """One that has something to say."""
        self._ends.append(end)
        self._bytes += _estimated_bytes(end)
        self._on_added(1)

    def unconfirmed_tokens(self) -> list[TokenRange]:
        """What is not known to be stored. For any thread: each part is copied in one step."""
        ends = tuple(self._ends)
        return [*self._done, *self._flying, *((end.token, 1) for end in ends)]

    async def run(self) -> None:
        """Publish what comes, for ever."""
        while True:
            await self._some.wait()
            await self._wait_for_batch()
            while report := self._next_report():
                await self._store(report)
                if not self._is_full:
                    break

    async def wait_for_capacity(self) -> None:
        """Returns when the backlog is small enough to add to it."""
        async with self._settled:
            await self._settled.wait_for(lambda: self._count < BACKLOG_ENDS_MAX and self._bytes < BACKLOG_BYTES_MAX)

    async def wait_until_stored(self, timeout_s: float) -> bool:
        """Whether all that has ended was stored in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._settled:
                await self._settled.wait_for(lambda: not self._count)
        return not self._count

    @property
    def _is_full(self) -> bool:
        return self._count >= BATCH_ENDS_MAX or self._bytes >= REPORT_BYTES_MAX

    def _on_added(self, n: int) -> None:
        self._count += n
        self._some.set()
        if self._is_full:
            self._full.set()

    async def _wait_for_batch(self) -> None:
        if self._busy() and not self._is_full:
            with suppress(TimeoutError):
                async with asyncio.timeout(BATCH_WAIT_S):
                    await self._full.wait()

    def _next_report(self) -> Report | None:
        """The next report. Its tokens are in flight before they leave where they were."""
        ends: list[AttemptResult] = []
        size = 0
        for end in self._ends:
            size += _estimated_bytes(end)
            if ends and size > REPORT_BYTES_MAX:
                break
            ends.append(end)
        done, took_ms = self._done, round(self._took_ms)
        self._flying = (*done, *((end.token, 1) for end in ends))
        del self._ends[: len(ends)]
        self._done, self._took_ms = [], 0.0
        if not self._ends:
            self._some.clear()
        self._full.clear()
        return Report(self._worker, done, ends, took_ms) if self._flying else None

    async def _store(self, report: Report) -> None:
        receipt = await self._publish(report)
        if receipt.outcome is PublishOutcome.REJECTED:
            await self._store_split(report, receipt.reason)
        else:
            self.reported = receipt.stream_seq
        self._flying = ()
        self._count -= sum(n for _, n in report.done) + len(report.ends)
        self._bytes -= sum(map(_estimated_bytes, report.ends))
        _count_reported(report)
        async with self._settled:
            self._settled.notify_all()

    async def _publish(self, report: Report) -> PublishReceipt:
        """Stored, or refused for ever: whatever lies between is tried again."""
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
                log.warning("report_waits", frames=sum(n for _, n in report.done) + len(report.ends))
            pause_s = PUBLISH_BACKOFF.pause_s(streak, _jitter())
            await (asyncio.sleep(pause_s) if self._bus.connected else self._bus.until_connected(pause_s))
        raise AssertionError("endless")

    async def _store_split(self, report: Report, reason: str) -> None:
        """A report that NATS never takes: too large for a server that takes less than we thought."""
        if report.done:
            await self._publish_or_drop(msgspec.structs.replace(report, ends=[]), reason)
        for end in report.ends:
            alone = Report(self._worker, ends=[end])
            receipt = await self._publish(alone)
            if receipt.outcome is PublishOutcome.REJECTED:
                refused = AttemptResult(
                    end.token, AttemptStatus.FAILED, code="result_too_large", error=f"NATS refuses it: {reason}."
                )
                await self._publish_or_drop(msgspec.structs.replace(alone, ends=[refused]), reason)
            else:
                self.reported = receipt.stream_seq

    async def _publish_or_drop(self, report: Report, reason: str) -> None:
        receipt = await self._publish(report)
        if receipt.outcome is PublishOutcome.REJECTED:
            ENDS_DROPPED.inc(len(report.ends) + sum(n for _, n in report.done))
            log.critical("report_dropped", reason=reason, frames=len(report.ends))
        else:
            self.reported = receipt.stream_seq


def _estimated_bytes(end: AttemptResult) -> int:
    return 64 + len(end.value or b"") + len(end.error) + sum(100 + len(each.data) for each in end.artifacts)


def _count_reported(report: Report) -> None:
    if report.done:
        FRAMES_REPORTED.labels(AttemptStatus.SUCCEEDED.value).inc(sum(n for _, n in report.done))
    for end in report.ends:
        FRAMES_REPORTED.labels(end.status.value).inc()
