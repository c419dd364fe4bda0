"""Declaration of agents: recurring work, run by the worker that acquires it.

    @app.agent(every="30s", timeout="2min")
    async def refresh() -> None: ...

A body takes no argument, or one: its run (`AgentRun`). An async body runs on the event loop, a sync one in a killable
process. An agent declared on a task submits a job of it instead, with one idempotency key per due time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import datetime
from typing import Any, TypedDict, Unpack

from rota.model.agents import AgentSpec, CatchUp, Overlap, validate_agent
from rota.model.errors import InvalidInput
from rota.model.schedules import CronSchedule, IntervalSchedule, OneTimeSchedule, Schedule
from rota.model.units import parse_duration
from rota.sdk.task import Call, Task


class AgentDefinition:
    """An agent declared by an app; `function` is None if it submits a job."""

    def __init__(self, spec: AgentSpec, function: Callable[..., Any] | None) -> None:
        self.spec = validate_agent(spec)
        self.function = function
        self.is_async = function is not None and inspect.iscoroutinefunction(function)
        self.takes_run = function is not None and _takes_run_argument(spec.name, function)

    def call(self, run: object) -> Any:
        """Calls the body; returns a coroutine if it is async."""
        assert self.function is not None, "this agent submits a job"
        return self.function(run) if self.takes_run else self.function()


class AgentOptions(TypedDict, total=False):
    """Schedule and behaviour of an agent. Durations are seconds, or text such as "10min"."""

    name: str
    every: float | str
    cron: str
    tz: str
    at: datetime
    timeout: float | str
    error_interval: float | str
    catch_up: CatchUp
    overlap: Overlap
    group: str


def define_agent(
    target: Callable[..., Any] | Call[Any] | Task[..., Any], **options: Unpack[AgentOptions]
) -> AgentDefinition:
    """Makes an agent of a function, a task or a call."""
    call = target.call() if isinstance(target, Task) else target if isinstance(target, Call) else None
    name = options.get("name", "") or (call.task.name if call is not None else getattr(target, "__name__", ""))
    spec = AgentSpec(
        name=name,
        schedule=_schedule(
            name, options.get("every"), options.get("cron"), options.get("tz", "UTC"), options.get("at")
        ),
        timeout_ms=_to_ms(options.get("timeout", 0)),
        error_interval_ms=_to_ms(options.get("error_interval", 0)),
        catch_up=options.get("catch_up", "one"),
        overlap=options.get("overlap", "skip"),
        group=options.get("group", ""),
        job=call.task.submissions([call])[0] if call is not None else None,
    )
    function = target if callable(target) and call is None else None
    return AgentDefinition(spec, function)


def _schedule(name: str, every: float | str | None, cron: str | None, zone: str, at: datetime | None) -> Schedule:
    if [every, cron, at].count(None) != 2:
        raise InvalidInput(f"Agent {name!r} needs exactly one schedule: pass every=, cron= or at=.")
    if every is not None:
        return IntervalSchedule(_to_ms(every))
    if cron is not None:
        return CronSchedule(cron, zone)
    assert at is not None
    if at.tzinfo is None:
        raise InvalidInput(f"Agent {name!r} runs at {at}, which has no time zone: use datetime(..., tzinfo=UTC).")
    return OneTimeSchedule(round(at.timestamp() * 1000))


def _to_ms(time: float | str) -> int:
    seconds = parse_duration(time) if isinstance(time, str) else float(time)
    if not 0 <= seconds < float("inf"):
        raise InvalidInput(f"{time!r} is not a valid duration: use seconds from 0, or text such as 10min.")
    return round(seconds * 1000)


def _takes_run_argument(name: str, function: Callable[..., Any]) -> bool:
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without a signature
        return False
    if _accepts(signature):
        return False
    if _accepts(signature, None):
        return True
    raise InvalidInput(
        f"The body of agent {name!r} takes too many arguments: accept none, or one (the run); give others defaults."
    )


def _accepts(signature: inspect.Signature, *args: object) -> bool:
    try:
        signature.bind(*args)
    except TypeError:
        return False
    return True
