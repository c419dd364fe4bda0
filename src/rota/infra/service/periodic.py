"""Periodic work beside a main loop, without blocking it.

A hanging pass is cancelled and counted; the next one retries. Passes of the same task never overlap.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from rota.infra.postgres.failures import FAILURES
from rota.infra.telemetry import metrics
from rota.model.errors import BreakerOpen, RotaError

log = structlog.get_logger(__name__)

PASS_FAILURES = metrics.counter(
    "rota_agents_run_failures", "Cycles and passes of agents that failed.", labels=("reason",)
)
PASS_DURATION = metrics.histogram(
    "rota_agents_cleanup_time_seconds", "Duration of a maintenance pass.", labels=("type",)
)
PASSES_TIMED_OUT = metrics.counter(
    "rota_agents_cleanup_timeout", "Passes that hung and were cancelled.", labels=("type",)
)
PASSES_SKIPPED = metrics.counter(
    "rota_agents_cleanup_skipped", "Passes skipped because the previous one took too long.", labels=("type",)
)
PASS_TIMEOUT_S: Final = 60.0
BUDGET_GRACE_S: Final = 30.0
EXPECTED_ERRORS = (RotaError, OSError, *FAILURES)


class PeriodicTask:
    """Runs `work` every `period_s`. On stop, a pass gets `patience_s` to finish, then `force_s` after cancellation."""

    def __init__(
        self,
        name: str,
        period_s: float,
        work: Callable[[], Awaitable[object]],
        *,
        budget_ms: int = 0,
        patience_s: float = 0.0,
        force_s: float = 2.0,
    ) -> None:
        self.name = name
        self._period_s = period_s
        self._work = work
        self._pass_timeout_s = budget_ms / 1000 + BUDGET_GRACE_S if budget_ms else PASS_TIMEOUT_S
        self._patience_s = patience_s
        self._force_s = force_s
        self._stopping = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None

    def start(self, tasks: asyncio.TaskGroup) -> None:
        self._task = tasks.create_task(self._run(), name=f"agents.{self.name}")

    async def stop(self) -> None:
        self._stopping.set()
        if self._task is None:
            return
        if self._patience_s > 0:
            await asyncio.wait({self._task}, timeout=self._patience_s)
        self._task.cancel()
        await asyncio.wait({self._task}, timeout=self._force_s)

    async def wait_idle(self) -> None:
        """Wait until the current pass has ended, for at most `patience_s`."""
        try:
            async with asyncio.timeout(self._patience_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("agents_pass_wait_timed_out", what=self.name)

    async def _run(self) -> None:
        while not await self._stopped_within(self._period_s):
            await self.run_once()

    async def run_once(self) -> None:
        began_at = asyncio.get_running_loop().time()
        limit = asyncio.timeout(self._pass_timeout_s)
        self._idle.clear()
        try:
            async with limit:
                await self._work()
        except Exception as error:  # noqa: BLE001 - the next pass may succeed
            if limit.expired():
                PASSES_TIMED_OUT.labels(self.name).inc()
            report_failure(self.name, error)
        finally:
            self._idle.set()
        took_s = asyncio.get_running_loop().time() - began_at
        PASS_DURATION.labels(self.name).observe(took_s)
        PASSES_SKIPPED.labels(self.name).inc(int(took_s / self._period_s))

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return False
        return True


def report_failure(what: str, error: Exception) -> None:
    """Log an expected failure as one line, any other with its traceback, as a bug."""
    reason = error.code if isinstance(error, RotaError) else type(error).__name__
    PASS_FAILURES.labels(reason).inc()
    if isinstance(error, BreakerOpen):
        return
    if isinstance(error, EXPECTED_ERRORS):
        text = error.sentence if isinstance(error, RotaError) else str(error)
        log.warning("agents_pass_failed", what=what, reason=reason, because=text)
    else:
        log.error("agents_pass_crashed", what=what, exc_info=error)
