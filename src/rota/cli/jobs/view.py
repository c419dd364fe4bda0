"""Formats jobs: tables, bars and sentences for people, plain values for JSON. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from rota.api.jobs import JobPage as JobsPage
from rota.api.jobs import JobView, Layer, PolicyDecisionView
from rota.cli.core import output
from rota.cli.core.tables import CliPage, Table, cores_text
from rota.cli.dlq.view import pluralize
from rota.engine.queries.jobs import FrameEnd
from rota.model.job_states import FrameState, JobState
from rota.model.jobs.frame_ranges import format_frames
from rota.model.jobs.submission import PRIORITIES, ResubmitResult, SubmitResult
from rota.model.reasons import Reason
from rota.model.units import humanize_duration

NO_JOBS: Final = "There is no matching job: `rota submit` creates one."
VALUE_CHARS_MAX: Final = 100
_PRIORITY_NAMES: Final = {number: word for word, number in PRIORITIES.items()}


class FrameValue(msgspec.Struct, frozen=True):
    """The return value of a frame, or the problem that prevents reading it."""

    value: Any = msgspec.UNSET
    problem: str | None = None

    def __str__(self) -> str:
        if self.value is msgspec.UNSET:
            return self.problem or ""
        return self.value if isinstance(self.value, str) else json_text(self.value)


def decode_value(data: bytes) -> Any:
    try:
        return msgspec.msgpack.decode(data)
    except msgspec.DecodeError:
        return data


def json_text(value: object) -> str:
    return msgspec.json.encode(value, enc_hook=str).decode()


def submitted_page(submitted: SubmitResult, job: JobView) -> CliPage:
    data = {"job": submitted.job, "state": submitted.state, "already": submitted.already}
    if submitted.already:
        return CliPage(data, [f"Nothing changed: job {submitted.job} already has this key, and it is {job.state}."])
    return CliPage(data, [f"Submitted job {submitted.job} ({job.name}, {pluralize(_frame_count(job), 'frame')})."])


def jobs_page(page: JobsPage, limit: int) -> CliPage:
    lines = page.items
    data = [msgspec.structs.asdict(line) for line in lines]
    # With a selective filter, the page can end before all jobs were scanned.
    more = [f"There may be more: continue with `--after {page.next}`."] if page.next and len(lines) < limit else []
    if not lines:
        return CliPage(data, [NO_JOBS, *more])
    now = datetime.now(UTC)
    rows = [
        (
            line.id,
            line.show,
            line.name,
            output.StyledText(line.state.value, state_style(line.state)),
            f"{line.ended} of {line.frames}",
            line.priority,
            line.topic,
            humanize_duration(max(0.0, (now - line.submitted_at).total_seconds())),
            _duration_text(line.submitted_at, line.finished_at),
            line.reason or "",
            ", ".join(f"{key}={value}" for key, value in sorted(line.labels.items())),
        )
        for line in lines
    ]
    columns = ("job", "show", "name", "state", "frames", "prio", "topic", "age", "took", "reason", "labels")
    return CliPage(data, [Table(columns, rows, wide=("prio", "topic", "labels")), *more])


def state_style(state: JobState) -> str:
    if state.terminal:
        return "green" if state is JobState.SUCCEEDED else "yellow" if state is JobState.CANCELLED else "red"
    return "cyan" if state in (JobState.DISPATCHED, JobState.RUNNING) else ""


def retried_page(result: ResubmitResult) -> CliPage:
    data = {"job": result.job, "retry_of": result.old, "frames": result.frames}
    return CliPage(data, [f"Job {result.job} runs {pluralize(result.frames, 'frame')} of job {result.old} again."])


def _duration_text(began: datetime, ended: datetime | None) -> str:
    return "" if ended is None else humanize_duration(max(0.0, (ended - began).total_seconds()))


def job_page(job: JobView, artifact_totals: tuple[int, int] = (0, 0)) -> CliPage:
    """`artifact_totals` is the number of artifacts and their total size in bytes."""
    layers = Table(
        ("layer", "runs", "frames", "needs", *(_state_label(state) for state in _present_states(job)), "id"),
        [(*_layer_row(layer, _present_states(job)), layer.id) for layer in job.layers],
        wide=("id",),
    )
    files, size = artifact_totals
    facts = _fact_lines(job)
    if files:
        facts.append(
            f"  artifacts: {pluralize(files, 'file')}, {pluralize(size, 'byte')}: `rota job artifacts {job.id}`"
        )
    data = job_data(job) | {"artifacts": files, "artifact_bytes": size}
    return CliPage(data, [_headline(job), *facts, "", layers, "", _history_text(job)])


def _headline(job: JobView) -> str:
    return f"{job.name} {job.id}: {job.state}{_reason_suffix(job.reason)}"


def reason_meaning(reason: str) -> str:
    """The meaning of a reason code; empty when `rota.model.reasons` does not have it."""
    try:
        return Reason(reason).meaning
    except ValueError:
        return ""


def _reason_suffix(reason: str | None) -> str:
    if reason is None:
        return ""
    return f" ({reason}: {meaning.rstrip('.')})" if (meaning := reason_meaning(reason)) else f" ({reason})"


def _fact_lines(job: JobView) -> list[str]:
    place = f"show {job.show}, folder {job.folder}, department {job.dept}, topic {job.topic}"
    word = _PRIORITY_NAMES.get(job.priority)
    facts = [f"  {place}, priority {job.priority}{f' ({word})' if word else ''}"]
    times = {"submitted": job.submitted_at, "not before": job.run_at, "deadline": job.deadline_at}
    times |= {"fails if still waiting at": job.wait_until, "finished": job.finished_at}
    facts.append("  " + ", ".join(f"{word} {_format_time(at)}" for word, at in times.items() if at is not None))
    if job.labels:
        facts.append("  labels " + ", ".join(f"{key}={value}" for key, value in sorted(job.labels.items())))
    if job.policy is not None:
        facts.append(f"  policy {_policy_text(job.policy)}")
    return facts


def _policy_text(decision: PolicyDecisionView) -> str:
    by = f"rule {decision.rule}" if decision.rule else "its default"
    of = f" of snapshot {decision.snapshot[:12]}" if decision.snapshot else ", without a request"
    limits = f"; {json_text(decision.constraints)}" if decision.constraints else ""
    return f"decision {decision.says.value} by {by}{of}{f': {decision.reason}' if decision.reason else ''}{limits}"


def _present_states(job: JobView) -> list[FrameState]:
    """States of at least one frame, live ones first."""
    return [state for state in FrameState if any(state in layer.counts for layer in job.layers)]


def _state_label(state: FrameState) -> str:
    return "on workers" if state is FrameState.DISPATCHED else state.value.lower().replace("_", " ")


def _layer_row(layer: Layer, states: Sequence[FrameState]) -> tuple[object, ...]:
    work = layer.work
    runs = work.task or " ".join(work.argv)
    counts = [layer.counts.get(state, 0) for state in states]
    return (
        layer.name,
        _truncate(runs),
        f"{layer.frames.count} ({format_frames(layer.frames)})",
        resources_text(layer),
        *counts,
    )


def resources_text(layer: Layer) -> str:
    work = layer.work
    parts = [cores_with_unit(work.cores)]
    if work.gpus:
        parts.append(pluralize(work.gpus, "GPU"))
    if work.memory_mb:
        parts.append(f"{work.memory_mb} MiB")
    return ", ".join(parts)


def cores_with_unit(amount: int) -> str:
    return f"{cores_text(amount)} {'core' if amount == 100 else 'cores'}"


def _history_text(job: JobView) -> str:
    steps = [
        f"{change.state} {_format_clock(change.at)}" + (f" ({change.reason})" if change.reason else "")
        for change in job.history
    ]
    return "  " + " > ".join(steps)


def job_data(job: JobView) -> dict[str, object]:
    data: dict[str, object] = msgspec.structs.asdict(job)
    data["details"] = _to_plain(job.details)
    data["policy"] = _to_plain(job.policy) if job.policy is not None else None
    data["layers"] = [layer_data(layer) for layer in job.layers]
    data["history"] = [msgspec.structs.asdict(change) for change in job.history]
    return data


def layer_data(layer: Layer) -> dict[str, object]:
    return {
        "id": layer.id,
        "name": layer.name,
        "queue": layer.queue,
        "task": layer.work.task or None,
        "argv": layer.work.argv or None,
        "frames": layer.frames.count,
        "frame_spec": format_frames(layer.frames),
        "cores": layer.work.cores / 100,
        "gpus": layer.work.gpus,
        "memory_mb": layer.work.memory_mb,
        "counts": {state.value: n for state, n in layer.counts.items()},
        "took_ms": layer.took_ms,
    }


def _to_plain(struct: msgspec.Struct) -> object:
    """Without unset fields; values that only msgpack can encode become text."""
    return msgspec.json.decode(msgspec.json.encode(struct, enc_hook=str))


def ended_page(job: JobView, failed: Sequence[tuple[Layer, FrameEnd]], values: Sequence[FrameValue]) -> CliPage:
    assert job.finished_at is not None, "it has ended"
    took = humanize_duration(max(0.0, (job.finished_at - job.submitted_at).total_seconds()))
    good = sum(layer.counts.get(FrameState.SUCCEEDED, 0) for layer in job.layers)
    frames = pluralize(_frame_count(job), "frame")
    parts: list[str | Table] = [
        f"{job.name} {job.state} after {took}{_reason_suffix(job.reason)}: {good} of {frames} succeeded."
    ]
    parts += [_failure_text(job, layer, end) for layer, end in failed]
    parts += [str(value) for value in values]
    return CliPage(job_data(job) | {"results": [value_data(value) for value in values]}, parts)


def _failure_text(job: JobView, layer: Layer, end: FrameEnd) -> str:
    frame = f"Frame {layer.frames.number(end.frame)}" if _frame_count(job) > 1 else "It"
    tries = f" at attempt {end.attempt}" if end.attempt > 1 else ""
    error = f", {_truncate(end.error)}" if end.error else ""
    return f"{frame} ended as {end.state}{tries}: {end.code or 'no code'}{error}"


def results_page(job: JobView, found: Sequence[tuple[Layer, FrameEnd, FrameValue]], limit: int) -> CliPage:
    data = [_result_data(layer, end, value) for layer, end, value in found]
    silent = sum(layer.counts.get(FrameState.SUCCEEDED, 0) for layer in job.layers)
    silent -= sum(end.state is FrameState.SUCCEEDED for _, end, _ in found)
    if not found:
        why = (
            f"{pluralize(silent, 'frame')} succeeded and returned nothing"
            if silent
            else "none of its frames has ended yet"
        )
        return CliPage(data, [f"Job {job.id} has no results: {why}."])
    several_layers = len(job.layers) > 1
    rows = [
        (
            *((layer.name,) if several_layers else ()),
            layer.frames.number(end.frame),
            end.state,
            end.attempt,
            f"{end.took_ms} ms",
            _truncate(str(value)) if end.state is FrameState.SUCCEEDED else _truncate(f"{end.code}: {end.error or ''}"),
        )
        for layer, end, value in found
    ]
    columns = (*(("layer",) if several_layers else ()), "frame", "state", "attempt", "took", "result")
    parts: list[str | Table] = [Table(columns, rows)]
    if len(found) >= limit:
        parts.append(f"The first {limit} are shown: `--limit` shows more, `--frame` shows one.")
    return CliPage(data, parts)


def _result_data(layer: Layer, end: FrameEnd, value: FrameValue) -> dict[str, object]:
    return {
        "layer": layer.name,
        "frame": layer.frames.number(end.frame),
        "attempt": end.attempt,
        "state": end.state,
        "code": end.code,
        "error": end.error,
        "took_ms": end.took_ms,
        "worker": end.worker,
        "finished_at": end.finished_at,
        **value_data(value),
    }


def value_data(value: FrameValue) -> dict[str, object]:
    if value.problem is not None:
        return {"value": None, "problem": value.problem}
    return {"value": None if value.value is msgspec.UNSET else value.value}


def cancelled_page(jobs: Sequence[JobView], requested: Sequence[bool]) -> CliPage:
    data, parts = [], []
    for job, was_live in zip(jobs, requested, strict=True):
        data.append({"job": job.id, "state": job.state, "changed": was_live})
        parts.append(_cancelled_text(job, was_live=was_live))
    return CliPage(data, parts)


def _cancelled_text(job: JobView, *, was_live: bool) -> str:
    if not was_live:
        return f"Nothing changed: job {job.id} has ended as {job.state}."
    if not job.state.terminal:
        return f"Job {job.id} is being cancelled: no more frames start, and a server stops the running ones."
    stopped = sum(layer.counts.get(FrameState.CANCELLED, 0) for layer in job.layers)
    if job.state is not JobState.CANCELLED:
        return f"Job {job.id} ended as {job.state} in the meantime."
    return f"Cancelled job {job.id}: {pluralize(stopped, 'frame')} of {_frame_count(job)} were stopped or will not run."


def _frame_count(job: JobView) -> int:
    return sum(layer.frames.count for layer in job.layers)


def frame_counts(job: JobView) -> Mapping[FrameState, int]:
    return {state: sum(layer.counts.get(state, 0) for layer in job.layers) for state in _present_states(job)}


def _format_time(at: datetime) -> str:
    return f"{at.astimezone():%Y-%m-%d %H:%M:%S}"


def _format_clock(at: datetime) -> str:
    local = at.astimezone()
    return f"{local:%H:%M:%S}.{local.microsecond // 1000:03}"


def _truncate(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= VALUE_CHARS_MAX else f"{line[: VALUE_CHARS_MAX - 3]}..."
