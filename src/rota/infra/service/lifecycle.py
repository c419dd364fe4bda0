"""One unit of background work: start, ready, drain, stop.

    async def relay(lifecycle: Lifecycle) -> None:
        await connect()
        lifecycle.ready()
        while await lifecycle.pause(0.2):
            await publish_some()

    service = Service("relay", relay)

        new ─► starting ─► ready ─► draining ─► stopped
                  ▲          │
                  └ restarting (crashed, backing off) ─► failed (too many crashes, or set-up failed)

Invariants, all enforced by `Service`:
- it runs once. Stop wins over start: stop before, during or after start, once or repeatedly, ends in `stopped`;
- a task of the caller's TaskGroup runs its body in a second one, and `stop` returns when both have ended;
- a body ends because it was asked to; any other end is a crash, restarted after an exponential, capped back-off with
  jitter, so that replicas do not restart in step;
- only a bug (`rota.model.error_reactions`) counts towards `RestartPolicy.limit`. Waiting for a server, or for a
  correction of its set-up, may continue forever, unready but alive; a set-up or input error before the first `ready` is
  final, because the operator who starts the process corrects it.

A crash loses only what the body had not yet made durable. In a resumed process all pauses are over; the body must check
its leases before it writes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

import structlog

from rota.infra.asyncio_cancel import run_cancellable
from rota.infra.telemetry import metrics
from rota.model.backoff import Backoff
from rota.model.error_reactions import Reaction, is_transient, reaction_to
from rota.model.errors import InvalidInput, RotaError, SetupFailed

log = structlog.get_logger(__name__)
SERVICE_RESTARTS = metrics.counter("rota_service_restarts", "Restarts of crashed services.", labels=("service",))

CANCEL_GRACE_S = 2.0
"""Time for a cancelled body to clean up before it counts as stuck."""


class ServiceState(StrEnum):
    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        return self in (ServiceState.STOPPED, ServiceState.FAILED)


RESTART_BACKOFF = Backoff(first_s=0.1, longest_s=10.0)
OUTAGE_PAUSE_MAX_S = 3.0
"""Longest pause while a server is unavailable or refuses, because work stands still until the service is back."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often a crashed body is restarted. `steady_s` of readiness reset the count."""

    limit: int = 5
    pauses: Backoff = RESTART_BACKOFF
    steady_s: float = 60.0


class EndedEarly(Exception):
    """The body returned, or was cancelled from inside, without being asked to end."""


class Lifecycle:
    """A body's view of its service: it reports readiness and learns when to drain. New for every start."""

    def __init__(self, draining: asyncio.Event, on_ready: Callable[[], None]) -> None:
        self._draining = draining
        self._on_ready = on_ready
        self.ready_at: float | None = None

    def ready(self) -> None:
        """Report that the work is running. Idempotent."""
        if self.ready_at is None:
            self.ready_at = asyncio.get_running_loop().time()
            self._on_ready()

    @property
    def draining(self) -> bool:
        """Whether to accept no new work, finish current work and return."""
        return self._draining.is_set()

    async def until_draining(self) -> None:
        await self._draining.wait()

    async def pause(self, seconds: float) -> bool:
        """Sleep, or until draining. True to continue: `while await lifecycle.pause(1): ...`."""
        try:
            async with asyncio.timeout(seconds):
                await self._draining.wait()
        except TimeoutError:
            return not self.draining
        return False


class Service:
    """A supervised body. The module lists its guarantees."""

    def __init__(
        self,
        name: str,
        run: Callable[[Lifecycle], Awaitable[None]],
        *,
        restarts: RestartPolicy | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.name = name
        self.state = ServiceState.NEW
        self.error: Exception | None = None
        """The last crash."""
        self.cut = False
        """Whether running work was cancelled, or the body crashed while draining."""
        self._run = run
        self._restarts = restarts or RestartPolicy()
        self._chance = chance
        self._draining = asyncio.Event()
        self._changed = asyncio.Event()
        self._listeners: list[Callable[[Service], None]] = []
        self._task: asyncio.Task[None] | None = None
        self._hurry: asyncio.Future[None] | None = None
        self._failures = 0
        self._crashes = 0
        self._was_ready = False

    def subscribe(self, listener: Callable[[Service], None]) -> None:
        """Call `listener` after every change of `state`."""
        self._listeners.append(listener)

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Start, unless it was started or stopped before."""
        if self._task is None and not self._draining.is_set():
            self._set_state(ServiceState.STARTING)
            self._hurry = asyncio.get_running_loop().create_future()
            self._task = tasks.create_task(self._supervise(), name=f"service {self.name}")
            self._task.add_done_callback(self._on_end)

    async def wait_for(self, *states: ServiceState) -> ServiceState:
        """Wait for one of `states`, or for the end."""
        while self.state not in states and not self.state.ended:
            await self._changed.wait()
        return self.state

    def drain(self) -> None:
        """Ask the body to finish its work and return. A body that is not ready is cancelled, as it has no work."""
        if self._draining.is_set():
            return
        idle = self.state is not ServiceState.READY
        self._draining.set()
        if self._task is None:
            self._set_state(ServiceState.STOPPED)
        elif not self.state.ended:
            self._set_state(ServiceState.DRAINING)
            if idle:
                self._task.cancel()

    def cancel(self) -> None:
        """Cancel the body immediately; a concurrent `stop` stops waiting for its budget."""
        self.drain()
        if self._task is None or self._task.done():
            return
        if not self._task.cancelling():
            self.cut = True
            log.warning("service_cancelled", service=self.name)
            self._task.cancel()
        if self._hurry is not None and not self._hurry.done():
            self._hurry.set_result(None)

    async def stop(self, budget_s: float) -> bool:
        """Drain, cancel after `budget_s`, and wait for the end. False if even cancelling did not end it."""
        self.drain()
        if self._task is None or self._hurry is None:
            return True
        await asyncio.wait({self._task, self._hurry}, timeout=budget_s, return_when=asyncio.FIRST_COMPLETED)
        if not self._task.done():
            self.cancel()
            await asyncio.wait({self._task}, timeout=CANCEL_GRACE_S)
        return self._task.done()

    def _on_end(self, _task: asyncio.Task[None]) -> None:
        """A task that is cancelled before its first step does not run its `finally`."""
        if not self.state.ended:
            self._set_state(ServiceState.STOPPED)

    def _set_state(self, state: ServiceState) -> None:
        if state is self.state:
            return
        self.state = state
        self._changed.set()
        self._changed = asyncio.Event()
        for listener in self._listeners:
            listener(self)

    def _on_ready(self) -> None:
        self._was_ready = True
        if self.state is ServiceState.STARTING:
            self._set_state(ServiceState.READY)

    async def _supervise(self) -> None:
        try:
            while not self._draining.is_set():
                await self._run_once()
        finally:
            if self.state is not ServiceState.FAILED:
                self._set_state(ServiceState.STOPPED)

    async def _run_once(self) -> None:
        """One run of the body and, after a crash, the back-off."""
        self._set_state(ServiceState.STARTING)
        lifecycle = Lifecycle(self._draining, self._on_ready)
        crash = await self._outcome(lifecycle)
        if crash is None:
            return
        self.error = crash
        if self._draining.is_set():
            self.cut = True
            log.error("service_crashed_while_draining", service=self.name, exc_info=crash)
        elif self._is_final(crash, lifecycle):
            log.critical("service_failed", service=self.name, crashes=self._crashes, **_error_facts(crash))
            self._draining.set()
            self._set_state(ServiceState.FAILED)
        else:
            await self._back_off(crash)

    async def _outcome(self, lifecycle: Lifecycle) -> Exception | None:
        try:
            # In a task of its own: a TaskGroup that failed leaves a cancellation in the count of its task.
            await run_cancellable(self._body(lifecycle))
        except asyncio.CancelledError as cancelled:
            if not cancelled_from_inside():
                if self._draining.is_set() and isinstance(cancelled.__cause__, Exception):
                    return cancelled.__cause__
                raise
            ended = EndedEarly(f"Service {self.name} was cancelled from inside.")
            ended.__cause__ = cancelled
            return ended
        except Exception as crash:  # noqa: BLE001 - the only place that classifies crashes
            return crash
        if self._draining.is_set():
            return None
        return EndedEarly(f"Service {self.name} returned without being asked to.")

    async def _body(self, lifecycle: Lifecycle) -> None:
        await self._run(lifecycle)

    def _is_final(self, crash: Exception, lifecycle: Lifecycle) -> bool:
        now = asyncio.get_running_loop().time()
        if lifecycle.ready_at is not None and now - lifecycle.ready_at >= self._restarts.steady_s:
            self._failures = self._crashes = 0
        if not self._was_ready and isinstance(crash, SetupFailed | InvalidInput):
            return True
        self._failures += 1
        self._crashes += reaction_to(crash) is Reaction.BUG
        return self._crashes > self._restarts.limit

    async def _back_off(self, crash: Exception) -> None:
        pause_s = self._restarts.pauses.pause_s(self._failures, self._chance())
        SERVICE_RESTARTS.labels(self.name).inc()
        self._set_state(ServiceState.RESTARTING)
        if reaction_to(crash) is not Reaction.BUG:
            pause_s = min(pause_s, OUTAGE_PAUSE_MAX_S)
        if is_transient(crash):
            log.warning(
                "service_dependency_unavailable", service=self.name, reason=str(crash), restart_in_s=round(pause_s, 3)
            )
        else:
            log.error("service_crashed", service=self.name, restart_in_s=round(pause_s, 3), exc_info=crash)
        await asyncio.sleep(pause_s)


def cancelled_from_inside() -> bool:
    """Whether a CancelledError just caught came from an awaited operation, because this task was not cancelled."""
    task = asyncio.current_task()
    return task is None or not task.cancelling()


def _error_facts(crash: Exception) -> dict[str, object]:
    """An expected error has a sentence with a remedy; any other needs its traceback."""
    if isinstance(crash, RotaError):
        return {"code": crash.code, "reason": crash.sentence}
    return {"exc_info": crash}
