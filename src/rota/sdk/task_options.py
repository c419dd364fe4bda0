"""Submission options of a task: `task.options(...)`. No I/O.

Defaults come from the task's declaration, then from Rota.
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
    """The show whose quota is used; default: the app's."""
    folder: str
    dept: str
    topic: str
    priority: int | str
    """From 1 to 9, or BATCH (1), INTERACTIVE (5) or CRITICAL (9)."""
    labels: Mapping[str, str]
    requires: Sequence[str]
    env: Mapping[str, str]
    key: str
    """Idempotency key: the same submission with the same key is one job."""
    deadline: DurationLike | datetime
    """The job ends as TIMEOUT at this time: a duration after submission, or a datetime."""
    max_wait: DurationLike
    """The job fails if no frame was dispatched for this long."""
    run_at: DurationLike | datetime
    """Earliest start: a duration after submission, or a datetime; see `schedule`."""
    after: Sequence[Job[Any] | SyncJob[Any] | UUID]
    """Jobs that must succeed first; until then this job is PENDING."""
    after_failed: AfterFailed
    """If one of these does not succeed: "cancel" this job, "fail" it, or "run" it anyway."""
    cores: float | str
    gpus: int
    memory: str | int
    retries: int | Retries
    timeout: DurationLike
    max_cores: float | str
    max_gpus: int
    artifacts: Sequence[str]


def validate_options(options: TaskOptions) -> TaskOptions:
    """Raises InvalidInput for unknown options."""
    for name in options:
        if name not in TaskOptions.__annotations__:
            matches = get_close_matches(name, TaskOptions.__annotations__, n=1)
            hint = f"did you mean {matches[0]}?" if matches else f"use one of {', '.join(TaskOptions.__annotations__)}."
            raise InvalidInput(f"A job has no option {name!r}: {hint}")
    return options


def build_submission(work: Work, topic: str, app: Rota, options: TaskOptions, now_ms: int, **frames: Any) -> Submission:
    """A submission with one layer; `frames` are its input and range, or its items."""
    layer = LayerSpec(task=work.task, **frame_options(work, options), **frames)
    fields: dict[str, Any] = {
        "show": options.get("show", app.show),
        "actor_id": app.actor,
        "actor_type": "service" if app.actor else "",
        "topic": options.get("topic", topic),
        "layers": (layer,),
        "idempotency_key": options.get("key", UNSET),
        "max_wait_s": to_seconds(options["max_wait"], "max_wait") if "max_wait" in options else UNSET,
        "run_at": _to_datetime(options["run_at"], now_ms) if "run_at" in options else UNSET,
        "budget": Budget(deadline_ms=_deadline_ms(options["deadline"], now_ms)) if "deadline" in options else UNSET,
        "after": tuple(getattr(each, "id", each) for each in options["after"]) if "after" in options else UNSET,
        "labels": dict(options["labels"]) if "labels" in options else UNSET,
        "env": dict(options["env"]) if "env" in options else UNSET,
        "requires": tuple(options["requires"]) if "requires" in options else UNSET,
    }
    for name in ("name", "folder", "dept", "priority", "max_cores", "max_gpus", "after_failed"):
        fields[name] = options.get(name, UNSET)
    return Submission(**{name: value for name, value in fields.items() if value is not UNSET})


def frame_options(work: Work, options: TaskOptions) -> dict[str, Any]:
    """Options of each frame."""
    retries = options.get("retries", work.retries)
    retries = Retries(most=retries) if isinstance(retries, int) else retries
    memory = options.get("memory", work.memory_mb)
    return {
        "cores": options.get("cores", work.cores / 100),
        "gpus": options.get("gpus", work.gpus),
        "memory": memory if isinstance(memory, str) else f"{memory}MiB" if memory else "",
        "timeout_s": to_seconds(options["timeout"], "timeout") if "timeout" in options else work.timeout_s,
        "kill_after_s": work.kill_after_s,
        "retries": RetrySpec(
            most=retries.most, first_s=retries.first_s, longest_s=retries.longest_s, on=retries.on, lost=retries.lost
        )
        if retries != Retries()
        else 0,
        "artifacts": tuple(options.get("artifacts", work.artifacts)),
    }


def to_seconds(span: DurationLike, what: str) -> float:
    if isinstance(span, timedelta):
        span = span.total_seconds()
    seconds = parse_duration(span) if isinstance(span, str) else float(span)
    if not 0 <= seconds < float("inf"):
        raise InvalidInput(f"{span!r} is not a valid {what}: use seconds from 0, or text such as 10min.")
    return seconds


def _to_datetime(at: DurationLike | datetime, now_ms: int) -> datetime:
    if isinstance(at, datetime):
        if at.tzinfo is None:
            raise InvalidInput(f"{at} has no time zone: use datetime(..., tzinfo=UTC), or another zone.")
        return at
    return datetime.fromtimestamp(now_ms / 1000, UTC) + timedelta(seconds=to_seconds(at, "start delay"))


def _deadline_ms(deadline: DurationLike | datetime, now_ms: int) -> int:
    if not isinstance(deadline, datetime):
        return max(1, round(to_seconds(deadline, "deadline") * 1000))
    remaining_ms = round(_to_datetime(deadline, now_ms).timestamp() * 1000) - now_ms
    if remaining_ms <= 0:
        raise InvalidInput(f"The deadline {deadline} has passed: use one in the future.")
    return remaining_ms
