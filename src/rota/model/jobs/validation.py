"""A submission, checked and made ready to be written: `plan`. No I/O.

Every limit of a submission is here, and every refusal says which field, what it has and what is allowed. A plan holds
columns and bytes, so that whoever stores it asks nothing more; two layers with the same `Place` go to the same queue.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import lru_cache
from hashlib import sha256
from typing import Any, Final
from uuid import UUID

import msgspec
from msgspec.structs import replace

from rota.model.artifacts import check_patterns
from rota.model.errors import InvalidInput
from rota.model.jobs import frame_ranges
from rota.model.jobs.frame_ranges import FRAMES_MAX, FrameSet
from rota.model.jobs.submission import (
    CRITICAL,
    PRIORITIES,
    AfterFailed,
    Budget,
    Compensation,
    LayerSpec,
    LimitSpec,
    RetrySpec,
    Submission,
    SubmissionDetails,
    canonical_bytes,
    decode_submission,
)
from rota.model.jobs.work import TASK_CAPABILITY_PREFIX, ProcessLimits, Retries, Work
from rota.model.units import Centicores, format_cores, parse_cores, parse_cores_limit, parse_memory

LAYERS_MAX: Final = 100
ENTRIES_MAX: Final = 10_000
"""Ranges and items of one submission together."""
DEPENDENCIES_MAX: Final = 100
ITEM_BYTES_MAX: Final = 65_536
INPUT_BYTES_MAX: Final = 512 * 1024
LABELS_MAX: Final = 64
ENV_MAX: Final = 256
TAGS_MAX: Final = 64
DEPTH_MAX: Final = 32
ARGV_MAX: Final = 1_000
NAME_CHARS_MAX: Final = 200
KEY_CHARS_MAX: Final = 200
TEXT_CHARS_MAX: Final = 500
VALUE_CHARS_MAX: Final = 1_000
ENV_CHARS_MAX: Final = 32_768
GPUS_MAX: Final = 1_000
SECONDS_MAX: Final = 10 * 366 * 86_400.0
COUNT_MAX: Final = 2**53 - 1
CACHED_BYTES_MAX: Final = 4096
"""Longer ones are not remembered."""
TASK_CONSTRAINT_PREFIX: Final = f"constraint.{TASK_CAPABILITY_PREFIX}"
PLACEMENT_LABEL_PREFIXES: Final = ("placement.", "constraint.", "node.")
"""Labels that a worker must have; all others are only kept."""
RESERVED_LABELS: Final = frozenset({"retry_of", "agent", "remediation_of", "remediation_id", "is_compensation"})
RESERVED_LABEL_PREFIXES: Final = ("approval_", "saga_")
"""Labels that Rota sets itself, and believes nobody else about."""

_TOPIC = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*", re.ASCII)
_LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,127}", re.ASCII)
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/+-]{0,63}", re.ASCII)
_ENV = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)
_TEXTS: Final = ("capability", "actor_id", "tenant", "principal", "adapter_id", "pack_id", "workflow_id", "memory_id")
_COUNTS: Final = ("max_input_tokens", "max_output_tokens", "max_total_tokens", "deadline_ms")

_pack = msgspec.msgpack.Encoder(order="deterministic").encode


class PlacementSpec(msgspec.Struct, frozen=True, array_like=True):
    """All that placement looks at."""

    topic: str
    requires: tuple[str, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    preferred_pool: str = ""
    preferred_worker: str = ""
    cores: int = 100
    gpus: int = 0
    memory_mb: int = 0

    @property
    def digest(self) -> bytes:
        return sha256(_pack(self)).digest()


class ResourceCaps(msgspec.Struct, frozen=True):
    """-1 is no limit, as in the columns of the books."""

    cores: int = -1
    gpus: int = -1


class ValidatedLayer(msgspec.Struct, frozen=True):
    name: str
    place: PlacementSpec
    digest: bytes
    """Of the place."""
    work: bytes
    frames: FrameSet
    input: bytes | None = None
    items: tuple[bytes, ...] = ()
    """One per frame, when each has its own."""
    caps: ResourceCaps | None = None


class ValidatedSubmission(msgspec.Struct, frozen=True):
    show: str
    folder: str
    dept: str
    name: str
    topic: str
    priority: int
    layers: tuple[ValidatedLayer, ...]
    labels: str | None = None
    """As JSON."""
    details: bytes | None = None
    workflow_id: str | None = None
    deadline_ms: int | None = None
    max_wait_s: float | None = None
    run_at: datetime | None = None
    key: str | None = None
    digest: bytes | None = None
    """Of the whole submission, when it has a key."""
    caps: ResourceCaps | None = None
    after: tuple[UUID, ...] = ()
    after_failed: AfterFailed = "cancel"
    like: ValidatedSubmission | None = None
    """A plan that is the same but for name, input and workflow_id, and stands for many such."""


def validate_submission(
    submission: Submission, *, may_be_critical: bool = False, own: frozenset[str] = frozenset()
) -> ValidatedSubmission:
    """What to write for this submission, or InvalidInput; `own` are labels of Rota's that whoever calls has set.

    Of many that differ in name and input alone, all but these is checked once.
    """
    given = submission
    if len(given.layers) == 1 and not given.idempotency_key and given.context is None:
        [layer] = given.layers
        if layer.items is None and layer.input is not None:
            bare = _pack_value(replace(given, name="", layers=(replace(layer, input=None),)))
            if len(bare) <= CACHED_BYTES_MAX:
                shared = _validate_cached(bare, may_be_critical, own)
                [ready] = shared.layers
                name = given.name or ready.name
                _check_text("name of the job", name, NAME_CHARS_MAX)
                alone = replace(ready, input=_input(layer.input, ready.name))
                return replace(shared, name=name, layers=(alone,), like=shared)
    return _validate(given, may_be_critical, own)


@lru_cache(maxsize=1024)
def _validate_cached(bare: bytes, may_be_critical: bool, own: frozenset[str]) -> ValidatedSubmission:
    return _validate(decode_submission(bare), may_be_critical, own)


def _validate(given: Submission, may_be_critical: bool, own: frozenset[str]) -> ValidatedSubmission:
    _check_fields(given)
    _check_reserved_labels(given, own)
    priority = _priority(given.priority, may_be_critical=may_be_critical)
    if not given.layers:
        raise InvalidInput("A job needs at least one layer: say what it runs, as a task or an argv.")
    if len(given.layers) > LAYERS_MAX:
        raise InvalidInput(f"A job of {len(given.layers)} layers is too large: use at most {LAYERS_MAX}.")
    caps = _caps(given.max_cores, given.max_gpus, "job")
    layers = tuple(_layer(spec, given, number, caps) for number, spec in enumerate(given.layers))
    if len(layers) > 1:
        _check_layers(layers)
    name = given.name or layers[0].name
    _check_text("name of the job", name, NAME_CHARS_MAX)
    return ValidatedSubmission(
        show=given.show,
        folder=given.folder,
        dept=given.dept,
        name=name,
        topic=given.topic,
        priority=priority,
        layers=layers,
        labels=msgspec.json.encode(given.labels).decode() if given.labels else None,
        details=_details(given),
        workflow_id=given.workflow_id or None,
        deadline_ms=given.budget.deadline_ms or None,
        max_wait_s=given.max_wait_s or None,
        run_at=given.run_at,
        key=given.idempotency_key or None,
        digest=sha256(canonical_bytes(given)).digest() if given.idempotency_key else None,
        caps=caps,
        after=given.after,
        after_failed=given.after_failed,
    )


def _check_fields(given: Submission) -> None:
    for what in ("show", "folder", "dept"):
        _check_text(what, getattr(given, what), 64)
    _check_topic(given.topic)
    if given.labels:
        _check_labels(given.labels)
    if given.env:
        _check_env(given.env)
    for what in _TEXTS:
        if text := getattr(given, what):
            _check_text(what, text, TEXT_CHARS_MAX)
    if given.idempotency_key:
        _check_text("idempotency_key", given.idempotency_key, KEY_CHARS_MAX)
    _check_tags("requires", given.requires)
    _check_tags("risk_tags", given.risk_tags)
    _check_budget(given.budget)
    _check_number("step_index", given.step_index, COUNT_MAX)
    _check_seconds("max_wait_s", given.max_wait_s)
    _check_number("number of jobs in after", len(given.after), DEPENDENCIES_MAX)
    _check_depth("context", given.context)
    if given.context_hints is not None:
        _check_number("max_input_tokens of context_hints", given.context_hints.max_input_tokens, COUNT_MAX)
        _check_tags("tags of context_hints", given.context_hints.tags)
    if given.compensation is not None:
        _check_compensation(given.compensation)
    told = given.env.get("tenant_id")
    if told is not None and given.tenant and told != given.tenant:
        raise InvalidInput("The tenant of the submission and tenant_id of its env differ: leave one of them out.")


def _priority(given: int | str, *, may_be_critical: bool) -> int:
    number = PRIORITIES.get(given.upper(), 0) if isinstance(given, str) else given
    if not 1 <= number <= CRITICAL:
        raise InvalidInput(
            f"{_quote(given)} is no priority: give a number from 1 to 9, or BATCH (1), INTERACTIVE (5) or CRITICAL (9)."
        )
    if number == CRITICAL and not may_be_critical:
        raise InvalidInput("Priority CRITICAL is for operators: use INTERACTIVE, or ask for the operator role.")
    return number


def _layer(spec: LayerSpec, job: Submission, number: int, job_caps: ResourceCaps | None) -> ValidatedLayer:
    name = spec.name or _default_name(spec, number)
    _check_text(f"name of layer {number}", name, NAME_CHARS_MAX)
    frames, items = _frames(spec, name)
    work = _work(spec, job, name)
    caps = _caps(spec.max_cores, spec.max_gpus, f"layer {name}")
    for what, limit in (("job", job_caps), (f"layer {name}", caps)):
        _check_fits(work, limit, name, what)
    place = _placement(job, spec, work)
    value = spec.input if spec.input is not None else job.context
    return ValidatedLayer(
        name=name,
        place=place,
        digest=place.digest,
        work=_pack(work),
        frames=frames,
        input=None if value is None or items else _input(value, name),
        items=items,
        caps=caps,
    )


def _work(spec: LayerSpec, job: Submission, name: str) -> Work:
    _check_command(spec, name)
    if spec.env:
        _check_env(spec.env)
    if not 0 <= spec.gpus <= GPUS_MAX:
        raise InvalidInput(f"Layer {name} asks for {_quote(spec.gpus)} GPUs per frame: give 0 to {GPUS_MAX}.")
    _check_seconds(f"timeout_s of layer {name}", spec.timeout_s)
    _check_seconds(f"kill_after_s of layer {name}", spec.kill_after_s)
    return Work(
        task=spec.task,
        argv=spec.argv,
        env={**job.env, **spec.env} if spec.env else job.env,
        timeout_s=spec.timeout_s,
        kill_after_s=spec.kill_after_s,
        cores=parse_cores(spec.cores) if spec.cores != 1 else 100,
        gpus=spec.gpus,
        memory_mb=parse_memory(spec.memory) if spec.memory else 0,
        retries=_retries(spec.retries, name) if spec.retries != 0 else Retries(),
        limits=_limits(spec.limits, spec, name) if spec.limits is not None else ProcessLimits(),
        artifacts=check_patterns(spec.artifacts, name) if spec.artifacts else (),
        fail_fast=spec.fail_fast,
    )


def _check_command(spec: LayerSpec, name: str) -> None:
    if bool(spec.task) == bool(spec.argv):
        raise InvalidInput(f"Layer {name} must have either a task or an argv, to say what its frames run.")
    if spec.task:
        _check_text(f"task of layer {name}", spec.task, NAME_CHARS_MAX)
        return
    if len(spec.argv) > ARGV_MAX or any(len(word) > ENV_CHARS_MAX or "\0" in word for word in spec.argv):
        raise InvalidInput(
            f"The argv of layer {name} cannot be run: use at most {ARGV_MAX} words of at most {ENV_CHARS_MAX}"
            " characters, without NUL."
        )
    if not spec.argv[0]:
        raise InvalidInput(f"The argv of layer {name} begins with an empty word: name the program to run.")


def _retries(given: int | RetrySpec, name: str) -> Retries:
    spec = RetrySpec(most=given) if isinstance(given, int) else given
    _check_number(f"retries of layer {name}", spec.most, 1_000)
    if spec.lost != -1:
        _check_number(f"lost of retries of layer {name}", spec.lost, 1_000)
    for what, seconds in (("first_s", spec.first_s), ("longest_s", spec.longest_s)):
        _check_seconds(f"{what} of retries of layer {name}", seconds)
    return Retries(spec.most, spec.first_s, spec.longest_s, spec.on, spec.lost)


def _limits(given: LimitSpec, spec: LayerSpec, name: str) -> ProcessLimits:
    if not spec.argv:
        raise InvalidInput(f"Layer {name} has limits and runs a task: only commands can be held to them.")
    _check_number(f"cpu_s of limits of layer {name}", given.cpu_s, int(SECONDS_MAX))
    _check_number(f"open_files of limits of layer {name}", given.open_files, 2**31 - 1)
    return ProcessLimits(
        given.cpu_s,
        parse_memory(given.address) if given.address else 0,
        given.open_files,
        parse_memory(given.file_size) if given.file_size else 0,
    )


def _frames(spec: LayerSpec, name: str) -> tuple[FrameSet, tuple[bytes, ...]]:
    if spec.items is not None:
        if spec.frames is not None:
            raise InvalidInput(f"Layer {name} has both frames and items: give one of them.")
        return frame_ranges.frames_from_count(len(spec.items)), tuple(_item(item, name) for item in spec.items)
    match spec.frames:
        case None:
            return _ONE_FRAME, ()
        case int():
            return frame_ranges.frames_from_count(spec.frames), ()
        case str():
            return frame_ranges.parse_frames(spec.frames), ()


_ONE_FRAME: Final = FrameSet(0, 1)
_CONTAINERS: Final = (dict, list)


def _input(value: Any, name: str) -> bytes:
    _check_depth(f"input of layer {name}", value)
    data = _pack_value(value)
    if len(data) > INPUT_BYTES_MAX:
        raise InvalidInput(
            f"The input of layer {name} has {len(data)} bytes, at most {INPUT_BYTES_MAX} are allowed: write it where"
            " the workers can read it, and pass where that is."
        )
    return data


def _item(item: Any, name: str) -> bytes:
    _check_depth(f"item of layer {name}", item)
    data = _pack_value(item)
    if len(data) > ITEM_BYTES_MAX:
        raise InvalidInput(
            f"An item of layer {name} has {len(data)} bytes, at most {ITEM_BYTES_MAX} are allowed: put it into the"
            " store and give its pointer."
        )
    return data


def _placement(job: Submission, spec: LayerSpec, work: Work) -> PlacementSpec:
    if spec.requires:
        _check_tags("requires", spec.requires)
    requires = tuple(sorted({word.lower() for word in (*job.requires, *spec.requires)}))
    labels: tuple[tuple[str, str], ...] = ()
    if job.labels:
        labels = tuple(sorted(pair for pair in job.labels.items() if pair[0].startswith(PLACEMENT_LABEL_PREFIXES)))
    if work.task:
        # Only a worker that knows the task: each of them says which it has.
        labels = tuple(sorted((*labels, (f"{TASK_CONSTRAINT_PREFIX}{work.task}", "true"))))
    return PlacementSpec(
        job.topic,
        requires,
        labels,
        job.labels.get("preferred_pool", ""),
        job.labels.get("preferred_worker_id", ""),
        work.cores,
        work.gpus,
        work.memory_mb,
    )


def _caps(cores: float | str | None, gpus: int | None, what: str) -> ResourceCaps | None:
    if cores is None and gpus is None:
        return None
    if gpus is not None and not -1 <= gpus <= 2**31 - 1:
        raise InvalidInput(f"{_quote(gpus)} is no limit of GPUs for the {what}: give a number from 0, or -1 for none.")
    caps = ResourceCaps(-1 if cores is None else parse_cores_limit(cores), -1 if gpus is None else gpus)
    return caps if caps.cores > 0 or caps.gpus > 0 else None


def _check_fits(work: Work, caps: ResourceCaps | None, name: str, what: str) -> None:
    """A frame larger than a cap that was submitted with it would wait for ever."""
    if caps is None:
        return
    if 0 < caps.cores < work.cores:
        raise InvalidInput(
            f"A frame of layer {name} asks for {format_cores(Centicores(work.cores))} cores, and the {what} may use"
            f" {format_cores(Centicores(caps.cores))}: it could never run; raise the cap."
        )
    if 0 < caps.gpus < work.gpus:
        raise InvalidInput(
            f"A frame of layer {name} asks for {work.gpus} GPUs, and the {what} may use {caps.gpus}: it could never"
            " run; raise the cap."
        )


def _check_layers(layers: tuple[ValidatedLayer, ...]) -> None:
    names = [layer.name for layer in layers]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidInput(f"Two layers are called {_quote(twice)}: give each a name of its own.")
    frames = sum(layer.frames.count for layer in layers)
    if frames > FRAMES_MAX:
        raise InvalidInput(f"A job of {frames} frames is too large, at most {FRAMES_MAX} are allowed: submit several.")
    entries = sum(len(layer.items) or len(layer.frames.ranges) or 1 for layer in layers)
    if entries > ENTRIES_MAX:
        raise InvalidInput(
            f"A job with {entries} items and ranges of frames is too large, at most {ENTRIES_MAX} are allowed: submit"
            " several."
        )


def _details(given: Submission) -> bytes | None:
    details = SubmissionDetails(
        env=given.env,
        context=given.context if len(given.layers) > 1 or given.layers[0].input is not None else None,
        budget=given.budget if given.budget != _NO_BUDGET else None,
        requires=given.requires,
        capability=given.capability,
        risk_tags=given.risk_tags,
        actor_id=given.actor_id,
        actor_type=given.actor_type,
        tenant=given.tenant or given.env.get("tenant_id", ""),
        principal=given.principal,
        adapter_id=given.adapter_id,
        pack_id=given.pack_id,
        step_index=given.step_index,
        parent_job_id=given.parent_job_id,
        memory_id=given.memory_id,
        context_hints=given.context_hints,
        compensation=given.compensation,
        idempotency_key=given.idempotency_key,
        max_wait_s=given.max_wait_s,
        after=given.after,
        maps=tuple(number for number, layer in enumerate(given.layers) if layer.items is not None),
    )
    return None if details == _NO_DETAILS else _pack_value(details)


def _check_compensation(given: Compensation) -> None:
    _check_topic(given.topic)
    if given.task and given.argv:
        raise InvalidInput("The compensation has both a task and an argv: give one of them, or neither.")
    if given.task:
        _check_text("task of the compensation", given.task, NAME_CHARS_MAX)
    if given.priority is not None:
        # A compensation runs as CRITICAL by itself, so that is nothing to ask for.
        _priority(given.priority, may_be_critical=True)
    _check_labels(given.labels)
    _check_env(given.env)
    _check_tags("requires of the compensation", given.requires)
    _check_tags("risk_tags of the compensation", given.risk_tags)
    if given.budget is not None:
        _check_budget(given.budget)
    _check_depth("context of the compensation", given.context)


def _check_budget(given: Budget) -> None:
    for what in _COUNTS:
        _check_number(f"{what} of budget", getattr(given, what), COUNT_MAX if what != "deadline_ms" else _DEADLINE_MAX)


_NO_DETAILS: Final = SubmissionDetails()
_NO_BUDGET: Final = Budget()
_DEADLINE_MAX: Final = int(SECONDS_MAX * 1000)


def _check_labels(labels: Mapping[str, str]) -> None:
    if len(labels) > LABELS_MAX:
        raise InvalidInput(f"{len(labels)} labels are too many: use at most {LABELS_MAX}.")
    for key, value in labels.items():
        if not _LABEL.fullmatch(key):
            raise InvalidInput(
                f"{_quote(key)} cannot name a label: use up to 128 letters, digits, dots, slashes, hyphens and"
                " underscores."
            )
        if len(value) > VALUE_CHARS_MAX or "\0" in value:
            raise InvalidInput(
                f"The label {key} has a value of {len(value)} characters: use at most {VALUE_CHARS_MAX}, without NUL."
            )


def _check_reserved_labels(given: Submission, own: frozenset[str]) -> None:
    labels = [*given.labels, *(given.compensation.labels if given.compensation is not None else ())]
    for key in labels:
        if key not in own and (key.lower() in RESERVED_LABELS or key.lower().startswith(RESERVED_LABEL_PREFIXES)):
            raise InvalidInput(f"The label {_quote(key)} is one that Rota sets itself: leave it out.")


def _check_env(env: Mapping[str, str]) -> None:
    if len(env) > ENV_MAX:
        raise InvalidInput(f"{len(env)} environment variables are too many: use at most {ENV_MAX}.")
    for key, value in env.items():
        if not _ENV.fullmatch(key):
            raise InvalidInput(f"{_quote(key)} cannot name an environment variable: use letters, digits, underscores.")
        if len(value) > ENV_CHARS_MAX or "\0" in value:
            raise InvalidInput(
                f"The environment variable {key} has {len(value)} characters: use at most {ENV_CHARS_MAX}, without NUL."
            )


def _check_tags(what: str, words: Iterable[str]) -> None:
    for number, word in enumerate(words, 1):
        if number > TAGS_MAX:
            raise InvalidInput(f"There are too many {what}: use at most {TAGS_MAX}.")
        if not _TAG.fullmatch(word):
            raise InvalidInput(f"{_quote(word)} cannot be one of {what}: use up to 64 letters, digits and . : / + - _.")


def _check_topic(topic: str) -> None:
    if len(topic) > 100 or not _TOPIC.fullmatch(topic):
        raise InvalidInput(
            f"{_quote(topic)} is no topic: use up to 100 letters, digits, hyphens and underscores in words joined by"
            " dots."
        )


def _check_text(what: str, text: str, most: int) -> None:
    if not 0 < len(text) <= most or not text.isprintable():
        raise InvalidInput(f"{_quote(text)} cannot be the {what}: use 1 to {most} printable characters.")


def _check_number(what: str, number: int, most: int) -> None:
    if not 0 <= number <= most:
        raise InvalidInput(f"{_quote(number)} cannot be the {what}: give a whole number from 0 to {most}.")


def _check_seconds(what: str, seconds: float) -> None:
    if not 0 <= seconds <= SECONDS_MAX:
        raise InvalidInput(f"{_quote(seconds)} cannot be the {what}: give seconds from 0 to {SECONDS_MAX:.0f}.")


def _check_depth(what: str, value: Any, left: int = DEPTH_MAX) -> None:
    if not isinstance(value, _CONTAINERS):
        return
    if left == 0:
        raise InvalidInput(f"The {what} is nested more than {DEPTH_MAX} levels deep: make it flatter.")
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, _CONTAINERS):
            _check_depth(what, each, left - 1)


def _pack_value(value: Any) -> bytes:
    try:
        return _pack(value)
    except (OverflowError, ValueError, TypeError) as error:
        raise InvalidInput(f"A value of the submission cannot be stored: {str(error)[:200].rstrip('.')}.") from error


def _default_name(spec: LayerSpec, number: int) -> str:
    what = spec.task or (spec.argv[0].rpartition("/")[2] if spec.argv else "")
    return (what or f"layer{number}")[:NAME_CHARS_MAX] if number == 0 else f"{(what or 'layer')[:180]}-{number}"


def _quote(given: object) -> str:
    text = repr(given) if not isinstance(given, int) or given.bit_length() < 128 else "that number"
    return text if len(text) <= 40 else f"{text[:37]}..."
