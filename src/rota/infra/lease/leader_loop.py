"""A leader loop: periodic steps, run by the one replica that holds a lease.

A subclass declares its steps in `begin_term`, each with an interval. While this replica leads:
- a step runs at once after the election, or after one interval where the previous leader has just run it, and then
  `interval_s` after the end of its round. Due steps run one after the other in the order of their declaration; in a
  parallel loop each runs in its own task;
- a step that fails is counted, reported and repeated after a growing pause, never longer than its interval, unless
  its error is a bug (`rota.model.error_reactions`) and not in `retried`. Other steps go on, and the lease is kept, as
  long as it can be renewed;
- a bug ends the term, as described in `leadership`; so do `LeaseLost` and `StaleFence` in any case;
- a lost lease and draining cancel the running steps. A step that fails while it is cancelled ends as cancelled: its
  error is not retried, because the next round would run without the lease, or forever.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import structlog

from rota.infra.asyncio_cancel import run_cancellable
from rota.infra.lease.grant import Lease
from rota.infra.lease.leadership import Leadership
from rota.infra.lease.leases import Leases
from rota.infra.service.lifecycle import EndedEarly, Lifecycle, cancelled_from_inside
from rota.infra.telemetry import metrics
from rota.model.backoff import Backoff
from rota.model.error_reactions import Reaction, reaction_to
from rota.model.errors import LeaseLost, StaleFence

log = structlog.get_logger(__name__)

STEP_FAILURES = metrics.counter(
    "rota_leader_step_failures", "Steps of leader loops that failed and are repeated.", labels=("kind", "step")
)
RETRY_BACKOFF: Final = Backoff(first_s=2.0, longest_s=10.0)


@dataclass(slots=True)
class LeaderStep:
    """One periodic step of one term. In a parallel loop, setting `wake` makes it due."""

    name: str
    interval_s: float
    work: Callable[[], Coroutine[None, None, object]]
    at_once: bool = True
    wake: asyncio.Event | None = None
    failures: int = field(default=0, init=False)
    """In a row."""
    due_at: float = field(default=0.0, init=False)

    def is_due(self, now: float) -> bool:
        return now >= self.due_at or (self.wake is not None and self.wake.is_set())


class LeaderLoop(ABC):
    """Run as `Service(name, loop.run)` in every replica; one of them leads."""

    def __init__(
        self,
        leases: Leases,
        lease: str,
        *,
        kind: str,
        ttl_s: float = 4.0,
        retried: tuple[type[Exception], ...] = (),
        parallel: bool = False,
    ) -> None:
        self.leases = leases
        self.leadership = Leadership(leases, lease, self._lead, kind=kind, ttl_s=ttl_s)
        self._kind = kind
        self._retried = retried
        self._parallel = parallel

    @abstractmethod
    def begin_term(self, lease: Lease) -> Sequence[LeaderStep]:
        """Called after the election: the steps of this term."""

    def end_term(self) -> None:
        """Called when the term has ended, for whatever reason."""
        return

    def on_step_done(self, step: str, took_s: float) -> None:
        """Called after each successful step."""
        del step, took_s

    def on_step_failed(self, step: str, error: Exception) -> None:
        """Called when a step has failed and will be repeated."""
        log.warning("leader_step_failed", kind=self._kind, step=step, reason=str(error))

    async def run(self, life: Lifecycle) -> None:
        life.ready()
        await self.leadership.serve(life)

    async def run_step(self, step: LeaderStep) -> None:
        """Run one step and report its end; raises what is not retried."""
        clock = self.leases.clock
        began_at = clock.monotonic()
        if step.wake is not None:
            step.wake.clear()
        try:
            await run_cancellable(step.work())
        except asyncio.CancelledError as cancelled:
            if cancelled_from_inside():
                raise EndedEarly(f"Step {step.name} of {self._kind} was cancelled from inside.") from cancelled
            raise
        except Exception as error:
            causes = _causes(error)
            if not all(self._is_retried(cause) for cause in causes):
                raise
            step.failures += 1
            STEP_FAILURES.labels(self._kind, step.name).inc()
            self.on_step_failed(step.name, causes[0])
        else:
            step.failures = 0
            self.on_step_done(step.name, clock.monotonic() - began_at)

    async def _lead(self, lease: Lease) -> None:
        try:
            await run_cancellable(self._run_steps(self.begin_term(lease)))
        finally:
            self.end_term()

    async def _run_steps(self, steps: Sequence[LeaderStep]) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for group in [[step] for step in steps] if self._parallel else [steps]:
                    tasks.create_task(self._run_rounds(group), name=f"lead.{self._kind}")
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None  # the first failure has cancelled the other tasks

    async def _run_rounds(self, steps: Sequence[LeaderStep]) -> None:
        """Run each step when it is due, until cancelled."""
        assert len(steps) == 1 or all(step.wake is None for step in steps), "only a parallel loop waits for events"
        clock = self.leases.clock
        began_at = clock.monotonic()
        for step in steps:
            step.due_at = began_at if step.at_once else began_at + step.interval_s
        while True:
            await self._wait(min(step.due_at for step in steps) - clock.monotonic(), steps[0].wake)
            due = [step for step in steps if step.is_due(clock.monotonic())]
            for step in due:
                await self.run_step(step)
            ended_at = clock.monotonic()
            for step in due:
                step.due_at = ended_at + _pause_s(step)

    async def _wait(self, pause_s: float, wake: asyncio.Event | None) -> None:
        if wake is None:
            await self.leases.clock.sleep(max(0.0, pause_s))
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await wake.wait()

    def _is_retried(self, error: Exception) -> bool:
        if isinstance(error, LeaseLost | StaleFence):
            return False
        return isinstance(error, self._retried) or reaction_to(error) is not Reaction.BUG


def _pause_s(step: LeaderStep) -> float:
    if not step.failures:
        return step.interval_s
    return min(step.interval_s, RETRY_BACKOFF.pause_s(step.failures, random.random()))  # noqa: S311 - jitter


def _causes(error: Exception) -> list[Exception]:
    """The errors inside the ExceptionGroup of a TaskGroup, or the error itself."""
    if isinstance(error, ExceptionGroup):
        return [cause for each in error.exceptions for cause in _causes(each)]
    return [error]
