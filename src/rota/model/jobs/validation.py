"""Validation of submissions: `validate_submission`. No I/O.

Every limit of a submission is here; every refusal names the field, its value and the allowed range. A
`ValidatedSubmission` contains columns and bytes, so that storing it needs no further checks. Layers with the same
`PlacementSpec` use the same queue.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from hashlib import sha256
from typing import Any, Final
from uuid import UUID

import msgspec
from msgspec.structs import astuple, replace

from rota.model.artifacts import check_patterns
from rota.model.errors import InvalidInput
from rota.model.identity.principals import UnverifiedFace, unverified_name
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
WORK_BYTES_MAX: Final = 400_000
"""Of a layer's command and environment. With its input it fits into one message to a worker, of at most 1 MiB."""
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
EARLIEST_RUN_AT: Final = datetime(1970, 1, 1, tzinfo=UTC)
LATEST_RUN_AT: Final = datetime(3000, 1, 1, tzinfo=UTC)
"""With any wait or deadline added, Python can still read the times of such a job."""
CACHED_BYTES_MAX: Final = 4096
"""Larger submissions are not cached."""
TASK_CONSTRAINT_PREFIX: Final = f"constraint.{TASK_CAPABILITY_PREFIX}"
PLACEMENT_LABEL_PREFIXES: Final = ("placement.", "constraint.", "node.")
"""Labels that a worker must have; all others are only stored."""
RESERVED_LABELS: Final = frozenset({"retry_of", "agent", "remediation_of", "remediation_id", "is_compensation"})
RESERVED_LABEL_PREFIXES: Final = ("approval_", "saga_")
"""Labels that only Rota sets; it refuses them from users."""

_TOPIC = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*", re.ASCII)
_LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,127}", re.ASCII)
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/+-]{0,63}", re.ASCII)
_ENV = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)
_TEXTS: Final = ("capability", "actor_id", "tenant", "principal", "adapter_id", "pack_id", "workflow_id", "memory_id")
_COUNTS: Final = ("max_input_tokens", "max_output_tokens", "max_total_tokens", "deadline_ms")

_pack = msgspec.msgpack.Encoder(order="deterministic").encode
_WORK_DEFAULTS: Final = astuple(Work())


class PlacementSpec(msgspec.Struct, frozen=True, array_like=True):
    """Everything placement depends on."""

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
    """-1: no limit, as in the accounting tables."""

    cores: int = -1
    gpus: int = -1


class ValidatedLayer(msgspec.Struct, frozen=True):
    name: str
    place: PlacementSpec
    digest: bytes
    """Digest of `place`."""
    work: bytes
    frames: FrameSet
    input: bytes | None = None
    items: tuple[bytes, ...] = ()
    """One per frame if each frame has its own input."""
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
    """Digest of the whole submission if it has an idempotency key."""
    caps: ResourceCaps | None = None
    after: tuple[UUID, ...] = ()
    after_failed: AfterFailed = "cancel"
    like: ValidatedSubmission | None = None
    """A shared submission that differs only in name, input and workflow_id."""


def validate_submission(
    submission: Submission, *, may_be_critical: bool = False, own: frozenset[str] = frozenset()
) -> ValidatedSubmission:
    """The submission in its stored form; raises InvalidInput. `own` are reserved labels that the caller has set itself.

    Submissions that differ only in name, idempotency key and input share one cached validation of everything else.
    """
    if len(submission.layers) == 1 and submission.context is None:
        [layer] = submission.layers
        if layer.items is None and layer.input is not None:
            bare = _pack_value(replace(submission, name="", idempotency_key="", layers=(replace(layer, input=None),)))
            if len(bare) <= CACHED_BYTES_MAX:
                return _with_own_parts(_validate_cached(bare, may_be_critical, own), submission, layer)
    return _validate(submission, may_be_critical, own)


def validate_unverified(
    submission: Submission, face: UnverifiedFace, *, may_be_critical: bool = False
) -> ValidatedSubmission:
    """The same for a submission that came without a key: its principal becomes a claim.

    The digest, which tells a repetition from another submission under the same key, is that of the submission as sent.
    """
    claim = unverified_name(face, submission.principal)
    plan = validate_submission(replace(submission, principal=claim), may_be_critical=may_be_critical)
    return plan if plan.key is None else replace(plan, digest=_digest(submission))


def _with_own_parts(shared: ValidatedSubmission, submission: Submission, layer: LayerSpec) -> ValidatedSubmission:
    """`shared` with the name, idempotency key and input of this submission."""
    [cached_layer] = shared.layers
    name, key = submission.name or cached_layer.name, submission.idempotency_key
    _check_text("name of the job", name, NAME_CHARS_MAX)
    layers = (replace(cached_layer, input=_input(layer.input, cached_layer.name)),)
    if not key:
        return replace(shared, name=name, layers=layers, like=shared)
    _check_text("idempotency_key", key, KEY_CHARS_MAX)
    details = _details(submission)  # they have the key
    return replace(shared, name=name, layers=layers, key=key, digest=_digest(submission), details=details)


@lru_cache(maxsize=1024)
def _validate_cached(bare: bytes, may_be_critical: bool, own: frozenset[str]) -> ValidatedSubmission:
    return _validate(decode_submission(bare), may_be_critical, own)


def _validate(submission: Submission, may_be_critical: bool, own: frozenset[str]) -> ValidatedSubmission:
    _check_fields(submission)
    _check_reserved_labels(submission, own)
    if submission.run_at is not None and not EARLIEST_RUN_AT <= submission.run_at < LATEST_RUN_AT:
        raise InvalidInput(
            f"run_at {submission.run_at.isoformat()} is out of range: use a time from the year 1970 to the year 2999."
        )
    priority = _priority(submission.priority, may_be_critical=may_be_critical)
    if not submission.layers:
        raise InvalidInput("A job needs at least one layer: add one with a task or an argv.")
    if len(submission.layers) > LAYERS_MAX:
        raise InvalidInput(f"A job of {len(submission.layers)} layers is too large: use at most {LAYERS_MAX}.")
    caps = _caps(submission.max_cores, submission.max_gpus, "job")
    layers = tuple(_layer(spec, submission, number, caps) for number, spec in enumerate(submission.layers))
    if len(layers) > 1:
        _check_layers(layers)
    name = submission.name or layers[0].name
    _check_text("name of the job", name, NAME_CHARS_MAX)
    return ValidatedSubmission(
        show=submission.show,
        folder=submission.folder,
        dept=submission.dept,
        name=name,
        topic=submission.topic,
        priority=priority,
        layers=layers,
        labels=msgspec.json.encode(submission.labels).decode() if submission.labels else None,
        details=_details(submission),
        workflow_id=submission.workflow_id or None,
        deadline_ms=submission.budget.deadline_ms or None,
        max_wait_s=submission.max_wait_s or None,
        run_at=submission.run_at,
        key=submission.idempotency_key or None,
        digest=_digest(submission),
        caps=caps,
        after=submission.after,
        after_failed=submission.after_failed,
    )


def _digest(submission: Submission) -> bytes | None:
    return sha256(canonical_bytes(submission)).digest() if submission.idempotency_key else None


def _check_fields(submission: Submission) -> None:
    for what in ("show", "folder", "dept"):
        _check_text(what, getattr(submission, what), 64)
    _check_topic(submission.topic)
    if submission.labels:
        _check_labels(submission.labels)
    if submission.env:
        _check_env(submission.env)
    for what in _TEXTS:
        if text := getattr(submission, what):
            _check_text(what, text, TEXT_CHARS_MAX)
    if submission.idempotency_key:
        _check_text("idempotency_key", submission.idempotency_key, KEY_CHARS_MAX)
    _check_tags("requires", submission.requires)
    _check_tags("risk_tags", submission.risk_tags)
    _check_budget(submission.budget)
    _check_number("step_index", submission.step_index, COUNT_MAX)
    _check_seconds("max_wait_s", submission.max_wait_s)
    _check_number("number of jobs in after", len(submission.after), DEPENDENCIES_MAX)
    _check_depth("context", submission.context)
    if submission.context_hints is not None:
        _check_number("max_input_tokens of context_hints", submission.context_hints.max_input_tokens, COUNT_MAX)
        _check_tags("tags of context_hints", submission.context_hints.tags)
    if submission.compensation is not None:
        _check_compensation(submission.compensation)
    env_tenant = submission.env.get("tenant_id")
    if env_tenant is not None and submission.tenant and env_tenant != submission.tenant:
        raise InvalidInput("The tenant of the submission and tenant_id of its env differ: set only one of them.")


def _priority(priority: int | str, *, may_be_critical: bool) -> int:
    number = PRIORITIES.get(priority.upper(), 0) if isinstance(priority, str) else priority
    if not 1 <= number <= CRITICAL:
        raise InvalidInput(
            f"{_quote(priority)} is not a valid priority: use a number from 1 to 9, or BATCH (1), INTERACTIVE (5) or"
            " CRITICAL (9)."
        )
    if number == CRITICAL and not may_be_critical:
        raise InvalidInput("Priority CRITICAL requires the operator role: use INTERACTIVE, or a key with that role.")
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
        work=_packed_work(work, name),
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
        raise InvalidInput(f"Layer {name} requests {_quote(spec.gpus)} GPUs per frame: use 0 to {GPUS_MAX}.")
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


def _packed_work(work: Work, name: str) -> bytes:
    """Without the last fields that have their default, which decoders add: 6 bytes instead of 78 for a task without
    options. They are stored with each layer, and again when its job ends."""
    fields = astuple(work)
    n = len(fields)
    while n > 1 and fields[n - 1] == _WORK_DEFAULTS[n - 1]:
        n -= 1
    packed = _pack(fields[:n])
    if len(packed) > WORK_BYTES_MAX:
        raise InvalidInput(
            f"The command and environment of layer {name} have {len(packed)} bytes, at most {WORK_BYTES_MAX} are"
            " allowed: store them where workers can read them, and pass their location."
        )
    return packed


def _check_command(spec: LayerSpec, name: str) -> None:
    if bool(spec.task) == bool(spec.argv):
        raise InvalidInput(f"Layer {name} must have either a task or an argv: set exactly one of them.")
    if spec.task:
        _check_text(f"task of layer {name}", spec.task, NAME_CHARS_MAX)
        return
    if len(spec.argv) > ARGV_MAX or any(len(word) > ENV_CHARS_MAX or "\0" in word for word in spec.argv):
        raise InvalidInput(
            f"The argv of layer {name} cannot be run: use at most {ARGV_MAX} arguments of at most {ENV_CHARS_MAX}"
            " characters, without NUL."
        )
    if not spec.argv[0]:
        raise InvalidInput(f"The argv of layer {name} begins with an empty argument: name the program to run.")


def _retries(retries: int | RetrySpec, name: str) -> Retries:
    spec = RetrySpec(most=retries) if isinstance(retries, int) else retries
    _check_number(f"retries of layer {name}", spec.most, 1_000)
    if spec.lost != -1:
        _check_number(f"lost of retries of layer {name}", spec.lost, 1_000)
    for what, seconds in (("first_s", spec.first_s), ("longest_s", spec.longest_s)):
        _check_seconds(f"{what} of retries of layer {name}", seconds)
    return Retries(spec.most, spec.first_s, spec.longest_s, spec.on, spec.lost)


def _limits(limits: LimitSpec, spec: LayerSpec, name: str) -> ProcessLimits:
    if not spec.argv:
        raise InvalidInput(f"Layer {name} has limits but runs a task: remove them, since they apply to commands only.")
    _check_number(f"cpu_s of limits of layer {name}", limits.cpu_s, int(SECONDS_MAX))
    _check_number(f"open_files of limits of layer {name}", limits.open_files, 2**31 - 1)
    return ProcessLimits(
        limits.cpu_s,
        parse_memory(limits.address) if limits.address else 0,
        limits.open_files,
        parse_memory(limits.file_size) if limits.file_size else 0,
    )


def _frames(spec: LayerSpec, name: str) -> tuple[FrameSet, tuple[bytes, ...]]:
    if spec.items is not None:
        if spec.frames is not None:
            raise InvalidInput(f"Layer {name} has both frames and items: set only one of them.")
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
            f"The input of layer {name} has {len(data)} bytes, at most {INPUT_BYTES_MAX} are allowed: store it where"
            " workers can read it, and pass its location."
        )
    return data


def _item(item: Any, name: str) -> bytes:
    _check_depth(f"item of layer {name}", item)
    data = _pack_value(item)
    if len(data) > ITEM_BYTES_MAX:
        raise InvalidInput(
            f"An item of layer {name} has {len(data)} bytes, at most {ITEM_BYTES_MAX} are allowed: put it into the"
            " store and pass its pointer."
        )
    return data


def _placement(job: Submission, spec: LayerSpec, work: Work) -> PlacementSpec:
    if spec.requires:
        _check_tags("requires", spec.requires)
    requires = tuple(sorted({tag.lower() for tag in (*job.requires, *spec.requires)}))
    labels: tuple[tuple[str, str], ...] = ()
    if job.labels:
        labels = tuple(sorted(pair for pair in job.labels.items() if pair[0].startswith(PLACEMENT_LABEL_PREFIXES)))
    if work.task:
        # Only workers that have the task: each announces its tasks as capabilities.
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
        raise InvalidInput(
            f"{_quote(gpus)} is not a valid GPU limit for the {what}: use a number from 0, or -1 for no limit."
        )
    caps = ResourceCaps(-1 if cores is None else parse_cores_limit(cores), -1 if gpus is None else gpus)
    return caps if caps.cores > 0 or caps.gpus > 0 else None


def _check_fits(work: Work, caps: ResourceCaps | None, name: str, what: str) -> None:
    """Refuse a frame larger than a cap submitted with it: it would wait forever."""
    if caps is None:
        return
    if 0 < caps.cores < work.cores:
        raise InvalidInput(
            f"A frame of layer {name} requests {format_cores(Centicores(work.cores))} cores, but the cap of the {what}"
            f" is {format_cores(Centicores(caps.cores))}: raise the cap, or the frame can never run."
        )
    if 0 < caps.gpus < work.gpus:
        raise InvalidInput(
            f"A frame of layer {name} requests {work.gpus} GPUs, but the cap of the {what} is {caps.gpus}: raise the"
            " cap, or the frame can never run."
        )


def _check_layers(layers: tuple[ValidatedLayer, ...]) -> None:
    names = [layer.name for layer in layers]
    if len(set(names)) < len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise InvalidInput(f"Two layers have the name {_quote(duplicate)}: give each its own name.")
    frames = sum(layer.frames.count for layer in layers)
    if frames > FRAMES_MAX:
        raise InvalidInput(f"A job of {frames} frames is too large, at most {FRAMES_MAX} are allowed: submit several.")
    entries = sum(len(layer.items) or len(layer.frames.ranges) or 1 for layer in layers)
    if entries > ENTRIES_MAX:
        raise InvalidInput(
            f"A job with {entries} items and ranges of frames is too large, at most {ENTRIES_MAX} are allowed: submit"
            " several."
        )


def _details(submission: Submission) -> bytes | None:
    details = SubmissionDetails(
        env=submission.env,
        context=submission.context if len(submission.layers) > 1 or submission.layers[0].input is not None else None,
        budget=submission.budget if submission.budget != _NO_BUDGET else None,
        requires=submission.requires,
        capability=submission.capability,
        risk_tags=submission.risk_tags,
        actor_id=submission.actor_id,
        actor_type=submission.actor_type,
        tenant=submission.tenant or submission.env.get("tenant_id", ""),
        principal=submission.principal,
        adapter_id=submission.adapter_id,
        pack_id=submission.pack_id,
        step_index=submission.step_index,
        parent_job_id=submission.parent_job_id,
        memory_id=submission.memory_id,
        context_hints=submission.context_hints,
        compensation=submission.compensation,
        idempotency_key=submission.idempotency_key,
        max_wait_s=submission.max_wait_s,
        after=submission.after,
        maps=tuple(number for number, layer in enumerate(submission.layers) if layer.items is not None),
    )
    return None if details == _NO_DETAILS else _pack_value(details)


def _check_compensation(compensation: Compensation) -> None:
    _check_topic(compensation.topic)
    if compensation.task and compensation.argv:
        raise InvalidInput("The compensation has both a task and an argv: set at most one of them.")
    if compensation.task:
        _check_text("task of the compensation", compensation.task, NAME_CHARS_MAX)
    if compensation.priority is not None:
        # Compensations always run as CRITICAL, so requesting it needs no role.
        _priority(compensation.priority, may_be_critical=True)
    _check_labels(compensation.labels)
    _check_env(compensation.env)
    _check_tags("requires of the compensation", compensation.requires)
    _check_tags("risk_tags of the compensation", compensation.risk_tags)
    if compensation.budget is not None:
        _check_budget(compensation.budget)
    _check_depth("context of the compensation", compensation.context)


def _check_budget(budget: Budget) -> None:
    for what in _COUNTS:
        _check_number(f"{what} of budget", getattr(budget, what), COUNT_MAX if what != "deadline_ms" else _DEADLINE_MAX)


_NO_DETAILS: Final = SubmissionDetails()
_NO_BUDGET: Final = Budget()
_DEADLINE_MAX: Final = int(SECONDS_MAX * 1000)


def _check_labels(labels: Mapping[str, str]) -> None:
    if len(labels) > LABELS_MAX:
        raise InvalidInput(f"{len(labels)} labels are too many: use at most {LABELS_MAX}.")
    for key, value in labels.items():
        if not _LABEL.fullmatch(key):
            raise InvalidInput(
                f"{_quote(key)} is not a valid label name: use up to 128 letters, digits, dots, slashes, hyphens and"
                " underscores."
            )
        if len(value) > VALUE_CHARS_MAX or "\0" in value:
            raise InvalidInput(
                f"The label {key} has a value of {len(value)} characters: use at most {VALUE_CHARS_MAX}, without NUL."
            )


def _check_reserved_labels(submission: Submission, own: frozenset[str]) -> None:
    labels = [*submission.labels, *(submission.compensation.labels if submission.compensation is not None else ())]
    for key in labels:
        if key not in own and (key.lower() in RESERVED_LABELS or key.lower().startswith(RESERVED_LABEL_PREFIXES)):
            raise InvalidInput(f"The label {_quote(key)} is reserved for Rota: remove it.")


def _check_env(env: Mapping[str, str]) -> None:
    if len(env) > ENV_MAX:
        raise InvalidInput(f"{len(env)} environment variables are too many: use at most {ENV_MAX}.")
    for key, value in env.items():
        if not _ENV.fullmatch(key):
            raise InvalidInput(
                f"{_quote(key)} is not a valid name of an environment variable: use letters, digits and underscores."
            )
        if len(value) > ENV_CHARS_MAX or "\0" in value:
            raise InvalidInput(
                f"The environment variable {key} has {len(value)} characters: use at most {ENV_CHARS_MAX}, without NUL."
            )


def _check_tags(what: str, tags: Iterable[str]) -> None:
    for number, tag in enumerate(tags, 1):
        if number > TAGS_MAX:
            raise InvalidInput(f"There are too many {what}: use at most {TAGS_MAX}.")
        if not _TAG.fullmatch(tag):
            raise InvalidInput(
                f"{_quote(tag)} is not a valid entry of {what}: use up to 64 letters, digits and . : / + - _."
            )


def _check_topic(topic: str) -> None:
    if len(topic) > 100 or not _TOPIC.fullmatch(topic):
        raise InvalidInput(
            f"{_quote(topic)} is not a valid topic: use up to 100 letters, digits, hyphens and underscores in parts"
            " joined by dots."
        )


def check_idempotency_key(key: str) -> None:
    _check_text("idempotency key", key, KEY_CHARS_MAX)


def _check_text(what: str, text: str, most: int) -> None:
    if not 0 < len(text) <= most or not text.isprintable():
        raise InvalidInput(f"{_quote(text)} is not a valid {what}: use 1 to {most} printable characters.")


def _check_number(what: str, number: int, most: int) -> None:
    if not 0 <= number <= most:
        raise InvalidInput(f"{_quote(number)} is not a valid {what}: use a whole number from 0 to {most}.")


def _check_seconds(what: str, seconds: float) -> None:
    if not 0 <= seconds <= SECONDS_MAX:
        raise InvalidInput(f"{_quote(seconds)} is not a valid {what}: use seconds from 0 to {SECONDS_MAX:.0f}.")


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


def _quote(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or value.bit_length() < 128 else "that number"
    return text if len(text) <= 40 else f"{text[:37]}..."
