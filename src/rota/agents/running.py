"""Active runs of this process: each has one task, one permit and one timer.

A run is stopped by cancelling its task; the stop reason determines its outcome, whatever the body does. A body that
ignores cancellation for `STOP_GRACE_S` is quarantined: its permit is released, its run remains the current one in
PostgreSQL, so no other begins, and it is shown until it ends. `close` returns how many never ended. No body takes a
step past the lease (`rota.agents.lease_watchdog`).

The time limit of a run counts from its acquisition, or from the moment its `PreparedBody` starts.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import msgspec
import structlog

from rota.agents.concurrency_permits import ConcurrencyPermit
from rota.agents.lease_watchdog import CancelOnLeaseExpiry
from rota.infra.clock import Clock
from rota.infra.telemetry import metrics
from rota.model.agents import AgentOutcome, AgentSpec
from rota.model.failure_classes import ClassifyHook, FailureClass, classify

log = structlog.get_logger(__name__)

STOP_GRACE_S: Final = 5.0
QUARANTINED = metrics.gauge("rota_agents_quarantined", "Runs of this process that ignore cancellation.")
START_FAILURES = metrics.counter(
    "rota_agents_acquire_submission_failures", "Runs that could not be started, by reason.", labels=("reason",)
)
RUNS_ENDED = metrics.counter("rota_agents_runs", "Agent runs that ended in this process.", labels=("outcome",))


class AgentRun(msgspec.Struct, frozen=True):
    """A run as its body sees it. `run` is unique; `token` is a fencing token for writes elsewhere."""

    name: str
    run: int
    slot_ms: int | None
    acquired_ms: int
    deadline_ms: int
    backfill: bool = False
    """Runs for a past slot, requested by a backfill."""
    token: int = 0
    """Greater than that of every earlier run of this agent."""


AgentBody = Callable[[AgentRun], Awaitable[object]]


class PreparedBody(ABC):
    """A body that needs time before it starts, such as for a process. Its time limit does not include that time."""

    @abstractmethod
    async def run(self, begin: Callable[[], AgentRun]) -> object:
        """Prepares, calls `begin` once, which starts the time limit, and runs the body of the run that it returns."""


class BodyFailed(Exception):
    """A body failed in another process, which classified the exception."""

    def __init__(self, text: str, failure: FailureClass) -> None:
        super().__init__(text)
        self.failure = failure


class ActiveRun:
    """One run. `outcome` and the fields after it are final once it has ended."""

    def __init__(
        self, spec: AgentSpec, about: AgentRun, streak: int, permit: ConcurrencyPermit, began_at: float
    ) -> None:
        self.spec = spec
        self.about = about
        self.streak = streak
        self.permit = permit
        self.began_at = began_at
        """When it was acquired, by the monotonic clock."""
        self.limited_since: float | None = began_at
        """When its time limit started; None while its body is prepared."""
        self.stopped_as: AgentOutcome | None = None
        self.stopped_at = 0.0
        self.quarantined = False
        self.shown = False
        """PostgreSQL has recorded the quarantine."""
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.outcome = AgentOutcome.SUCCEEDED
        self.failure: FailureClass | None = None
        self.error = ""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def number(self) -> int:
        return self.about.run


class ActiveRuns:
    def __init__(
        self,
        clock: Clock,
        on_ended: Callable[[ActiveRun], None],
        hook: ClassifyHook | None,
        lease_until: Callable[[], float],
    ) -> None:
        """`on_ended` is called once for every run that ends; `lease_until` is the deadline for all, by our clock."""
        self.by_name: dict[str, ActiveRun] = {}
        self._clock = clock
        self._on_ended = on_ended
        self._hook = hook
        self._lease_until = lease_until

    def __len__(self) -> int:
        return len(self.by_name)

    @property
    def stuck(self) -> list[ActiveRun]:
        return [run for run in self.by_name.values() if run.quarantined]

    def start(self, run: ActiveRun, body: AgentBody | PreparedBody, dead_man_s: float | None) -> None:
        """Start a run. It is stopped `dead_man_s` after its acquisition or preparation; None: never."""
        assert run.name not in self.by_name, "PostgreSQL allows one run per agent"
        self.by_name[run.name] = run
        call: Callable[[], Awaitable[object]]
        if isinstance(body, PreparedBody):
            run.limited_since = None
            call = partial(body.run, partial(self._begin_prepared, run, dead_man_s))
        else:
            self._start_timer(run, run.began_at, dead_man_s)
            call = partial(body, run.about)
        run.task = asyncio.create_task(self._run_body(run, call), name=f"agent {run.name}")
        run.task.add_done_callback(lambda _task: self._on_task_done(run))

    def stop(self, run: ActiveRun, outcome: AgentOutcome) -> None:
        """Cancel a run; a repeated call cancels again and keeps the first outcome."""
        if run.task is None or run.task.done():
            return
        if run.stopped_as is None:
            run.stopped_as = outcome
            run.stopped_at = self._clock.monotonic()
            log.warning("agent_stopped", agent=run.name, run=run.number, outcome=outcome)
        run.task.cancel()

    def quarantine(self) -> list[ActiveRun]:
        """Quarantine runs that have ignored cancellation for `STOP_GRACE_S`; returns the new ones."""
        since = self._clock.monotonic() - STOP_GRACE_S
        found = [
            run
            for run in self.by_name.values()
            if run.stopped_as is not None and run.stopped_at <= since and not run.quarantined
        ]
        for run in found:
            run.quarantined = True
            run.permit.release()
            log.error(
                "agent_quarantined",
                agent=run.name,
                run=run.number,
                remedy="the body ignores cancellation: make it stop on CancelledError",
            )
        QUARANTINED.set(len(self.stuck))
        return found

    async def close(self, timeout_s: float) -> int:
        """Stop all runs and wait; returns how many still run. Runs are cancelled again after half of the time."""
        for _ in range(2):
            for run in list(self.by_name.values()):
                self.stop(run, AgentOutcome.CANCELLED)
            tasks = [run.task for run in self.by_name.values() if run.task is not None]
            if tasks:
                await asyncio.wait(tasks, timeout=timeout_s / 2)
        return len(self.by_name)

    def _begin_prepared(self, run: ActiveRun, dead_man_s: float | None) -> AgentRun:
        """Start the time limit of a prepared run; returns the run with the deadline that it has now."""
        run.limited_since = self._clock.monotonic()
        self._start_timer(run, run.limited_since, dead_man_s)
        prepared_ms = round((run.limited_since - run.began_at) * 1000)
        return msgspec.structs.replace(run.about, deadline_ms=run.about.deadline_ms + prepared_ms)

    def _start_timer(self, run: ActiveRun, since: float, dead_man_s: float | None) -> None:
        if dead_man_s is not None:
            remaining_s = max(0.0, since + dead_man_s - self._clock.monotonic())
            run.timer = asyncio.get_running_loop().call_later(remaining_s, self.stop, run, AgentOutcome.TIMEOUT)

    async def _run_body(self, run: ActiveRun, call: Callable[[], Awaitable[object]]) -> None:
        try:
            await CancelOnLeaseExpiry(call(), self._is_lease_expired)
        except asyncio.CancelledError:
            if run.stopped_as is None and self._is_lease_expired():
                run.stopped_as = AgentOutcome.CANCELLED
            if run.stopped_as is None:
                self._fail(run, "It cancelled itself.", FailureClass.UNKNOWN)
        except BodyFailed as failed:
            self._fail(run, str(failed), failed.failure)
        except (SystemExit, KeyboardInterrupt) as exit_:
            self._fail(run, f"It tried to exit the process ({type(exit_).__name__}).", FailureClass.UNKNOWN)
        except BaseException as error:  # noqa: BLE001 - a body's exception ends its run, not the process
            self._fail(run, format_exception(error), classify(error, self._hook))

    def _is_lease_expired(self) -> bool:
        return self._clock.monotonic() >= self._lease_until()

    def _fail(self, run: ActiveRun, error: str, failure: FailureClass) -> None:
        run.outcome, run.error, run.failure = AgentOutcome.FAILED, error, failure

    def _on_task_done(self, run: ActiveRun) -> None:
        if run.timer is not None:
            run.timer.cancel()
        if run.stopped_as is not None:
            run.outcome = run.stopped_as
            if run.outcome is AgentOutcome.TIMEOUT:
                run.failure = FailureClass.TRANSIENT
                run.error = run.error or f"It ran longer than {run.spec.deadline_ms / 1000:g} s, and was stopped."
        elif run.task is not None and run.task.cancelled():
            # Cancelled before its first step: the body never ran.
            run.outcome = AgentOutcome.CANCELLED
        if self.by_name.get(run.name) is run:
            del self.by_name[run.name]
        run.permit.release()
        QUARANTINED.set(len(self.stuck))
        RUNS_ENDED.labels(run.outcome).inc()
        self._on_ended(run)


def format_exception(error: BaseException) -> str:
    """An exception in a line or two; only its type if it cannot be formatted."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - its own __str__ is broken
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
