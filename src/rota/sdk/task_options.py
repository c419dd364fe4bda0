"""How a task is submitted besides its arguments: `task.options(...)`. No I/O.

What is left out is as the task declares it, and else as Rota takes it to be meant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypedDict
from uuid import UUID

from msgspec import UNSET

from rota.model.errors import InvalidInput
from rota.model.jobs.submission import AfterFailed, Budget, LayerSpec, RetrySpec, Submission
from rota.model.jobs.work import Retries, Work
from rota.model.units import parse_duration

if TYPE_CHECKING:
    from rota.sdk.app import Rota
    from rota.sdk.job import Job
    from rota.sdk.sync import SyncJob

DurationLike = float | str | timedelta
"""Seconds, text such as "10min", or a timedelta."""


class TaskOptions(TypedDict, total=False):
    name: str
    show: str
    """Whose quota it uses; else the show of the app."""
    folder: str
    dept: str
    topic: str
    priority: int | str
    """From 1 to 9, or BATCH (1), INTERACTIVE (5) or CRITICAL (9)."""
    labels: Mapping[str, str]
    requires: Sequence[str]
    env: Mapping[str, str]
    key: str
    """The same key and the same submission are the same job, however often it is submitted."""
    deadline: DurationLike | datetime
    """It ends as TIMEOUT when it has not ended by then: so long after its submission, or at a moment."""
    max_wait: DurationLike
    """It fails when none of its frames was dispatched for so long."""
    run_at: DurationLike | datetime
    """Not before: so long after its submission, or at a moment; see `schedule`."""
    after: Sequence[Job[Any] | SyncJob[Any] | UUID]
    """Jobs that must have succeeded before it begins; until then it is PENDING."""
    after_failed: AfterFailed
    """When one of these does not succeed: "cancel" it, have it "fail", or "run" it all the same."""
    cores: float | str
    gpus: int
    memory: str | int
    retries: int | Retries
    timeout: DurationLike
    max_cores: float | str
    max_gpus: int
    artifacts: Sequence[str]


def validate_options(wanted: TaskOptions) -> TaskOptions:
    """InvalidInput for what is no option."""
    for name in wanted:
        if name not in TaskOptions.__annotations__:
            near = get_close_matches(name, TaskOptions.__annotations__, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(TaskOptions.__annotations__)}."
            raise InvalidInput(f"A job has no option {name!r}: {hint}")
    return wanted


def build_submission(work: Work, topic: str, app: Rota, wanted: TaskOptions, now_ms: int, **frames: Any) -> Submission:
    """One layer of this work; `frames` are its input and its range, or its items."""
    layer = LayerSpec(task=work.task, **frame_options(work, wanted), **frames)
    given: dict[str, Any] = {
        "show": wanted.get("show", app.show),
        "actor_id": app.actor,
        "actor_type": "service" if app.actor else "",
        "topic": wanted.get("topic", topic),
        "layers": (layer,),
        "idempotency_key": wanted.get("key", UNSET),
        "max_wait_s": to_seconds(wanted["max_wait"], "max_wait") if "max_wait" in wanted else UNSET,
        "run_at": _to_datetime(wanted["run_at"], now_ms) if "run_at" in wanted else UNSET,
        "budget": Budget(deadline_ms=_deadline_ms(wanted["deadline"], now_ms)) if "deadline" in wanted else UNSET,
        "after": tuple(getattr(each, "id", each) for each in wanted["after"]) if "after" in wanted else UNSET,
        "labels": dict(wanted["labels"]) if "labels" in wanted else UNSET,
        "env": dict(wanted["env"]) if "env" in wanted else UNSET,
        "requires": tuple(wanted["requires"]) if "requires" in wanted else UNSET,
    }
    for name in ("name", "folder", "dept", "priority", "max_cores", "max_gpus", "after_failed"):
        given[name] = wanted.get(name, UNSET)
    return Submission(**{name: value for name, value in given.items() if value is not UNSET})


def frame_options(work: Work, wanted: TaskOptions) -> dict[str, Any]:
    """Of each frame."""
    tries = wanted.get("retries", work.retries)
    tries = Retries(most=tries) if isinstance(tries, int) else tries
    memory = wanted.get("memory", work.memory_mb)
    return {
        "cores": wanted.get("cores", work.cores / 100),
        "gpus": wanted.get("gpus", work.gpus),
        "memory": memory if isinstance(memory, str) else f"{memory}MiB" if memory else "",
        "timeout_s": to_seconds(wanted["timeout"], "timeout") if "timeout" in wanted else work.timeout_s,
        "kill_after_s": work.kill_after_s,
        "retries": RetrySpec(
            most=tries.most, first_s=tries.first_s, longest_s=tries.longest_s, on=tries.on, lost=tries.lost
        )
        if tries != Retries()
        else 0,
        "artifacts": tuple(wanted.get("artifacts", work.artifacts)),
    }


def to_seconds(span: DurationLike, what: str) -> float:
    if isinstance(span, timedelta):
        span = span.total_seconds()
    passed = parse_duration(span) if isinstance(span, str) else float(span)
    if not 0 <= passed < float("inf"):
        raise InvalidInput(f"{span!r} is no {what}; write seconds from 0, or text such as 10min.")
    return passed


def _to_datetime(at: DurationLike | datetime, now_ms: int) -> datetime:
    if isinstance(at, datetime):
        if at.tzinfo is None:
            raise InvalidInput(f"{at} is a moment in no time zone: write datetime(..., tzinfo=UTC), or another zone.")
        return at
    return datetime.fromtimestamp(now_ms / 1000, UTC) + timedelta(seconds=to_seconds(at, "time to begin after"))


def _deadline_ms(deadline: DurationLike | datetime, now_ms: int) -> int:
    if not isinstance(deadline, datetime):
        return max(1, round(to_seconds(deadline, "deadline") * 1000))
    left_ms = round(_to_datetime(deadline, now_ms).timestamp() * 1000) - now_ms
    if left_ms <= 0:
        raise InvalidInput(f"The deadline {deadline} has passed: give one that is still to come.")
    return left_ms
