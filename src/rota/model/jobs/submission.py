"""The submission of a job. No I/O.

    Submission(show="film", name="comp", layers=(LayerSpec(task="render", frames="1-100", cores=2),))

The SDK, HTTP, the command line and `sys.job.submit` use the same struct. Input passes `decode_submission`, which
refuses unknown fields and wrong types, then `rota.model.jobs.validation.validate_submission`, which checks the rest;
nothing is written before both have passed. Times are relative to the moment of submission, except `run_at`.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Final, Literal
from uuid import UUID

import msgspec

from rota.model.errors import InvalidInput
from rota.model.ids import JobId
from rota.model.job_states import JobState
from rota.model.jobs.work import FailureKind

BATCH, INTERACTIVE, CRITICAL = 1, 5, 9
PRIORITIES: Final = {"BATCH": BATCH, "INTERACTIVE": INTERACTIVE, "CRITICAL": CRITICAL}
SUBMISSION_BYTES_MAX: Final = 1024 * 1024

AwareDatetime = Annotated[datetime, msgspec.Meta(tz=True)]
ActorType = Literal["", "human", "service"]
AfterFailed = Literal["cancel", "fail", "run"]
"""What happens to a job when one of its dependencies does not succeed: it is cancelled, fails, or runs anyway."""


class Budget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """0: no limit."""

    max_input_tokens: int = 0
    max_output_tokens: int = 0
    max_total_tokens: int = 0
    deadline_ms: int = 0
    """From submission; a job that has not ended by then ends as TIMEOUT."""


class ContextHints(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    max_input_tokens: int = 0
    allow_summarization: bool = False
    allow_retrieval: bool = False
    tags: tuple[str, ...] = ()


class Compensation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What undoes the job. Omitted fields are taken from the job itself."""

    topic: str
    task: str = ""
    argv: tuple[str, ...] = ()
    context: Any = None
    priority: int | str | None = None
    labels: dict[str, str] = {}
    env: dict[str, str] = {}
    budget: Budget | None = None
    requires: tuple[str, ...] = ()
    capability: str = ""
    risk_tags: tuple[str, ...] = ()
    actor_id: str = ""
    actor_type: ActorType = ""
    tenant: str = ""
    principal: str = ""
    adapter_id: str = ""
    pack_id: str = ""
    memory_id: str = ""
    context_hints: ContextHints | None = None
    idempotency_key: str = ""


class RetrySpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`rota.model.jobs.work.Retries` with named fields."""

    most: int = 0
    first_s: float = 1.0
    longest_s: float = 300.0
    on: frozenset[FailureKind] = frozenset({"error", "timeout"})
    lost: int = -1


class LimitSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`rota.model.jobs.work.ProcessLimits` with named fields: limits of each process of a command."""

    cpu_s: int = 0
    address: str = ""
    """Address space, such as 4GiB."""
    open_files: int = 0
    file_size: str = ""
    """Size of any file it writes, such as 1GiB."""


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Frames of the same kind. Needs either `task` or `argv`; one frame unless `frames` or `items` is set."""

    name: str = ""
    task: str = ""
    argv: tuple[str, ...] = ()
    frames: str | int | None = None
    """A spec such as "1-100x2", or the number of frames."""
    items: list[Any] | None = None
    """One frame per item; the item replaces `input`."""
    input: Any = None
    """Input of every frame; default: the job's context."""
    cores: int | float | str = 1
    gpus: int = 0
    memory: str = ""
    """Such as 512MiB or 4GiB."""
    requires: tuple[str, ...] = ()
    """In addition to those of the job."""
    env: dict[str, str] = {}
    timeout_s: float = 0.0
    kill_after_s: float = 5.0
    retries: int | RetrySpec = 0
    fail_fast: bool = False
    """The first frame that fails permanently ends the job: waiting frames do not start, running ones are stopped."""
    limits: LimitSpec | None = None
    artifacts: tuple[str, ...] = ()
    """Files that each frame must produce in its directory, such as "out/*.png"; they are stored with the job."""
    max_cores: int | float | str | None = None
    max_gpus: int | None = None


class Submission(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    show: str
    layers: tuple[LayerSpec, ...]
    name: str = ""
    """Default: that of the first layer."""
    folder: str = "default"
    dept: str = "default"
    topic: str = "default"
    priority: int | str = INTERACTIVE
    """A number from 1 to 9, or BATCH, INTERACTIVE or CRITICAL."""
    labels: dict[str, str] = {}
    env: dict[str, str] = {}
    context: Any = None
    budget: Budget = Budget()
    requires: tuple[str, ...] = ()
    capability: str = ""
    risk_tags: tuple[str, ...] = ()
    actor_id: str = ""
    actor_type: ActorType = ""
    tenant: str = ""
    principal: str = ""
    adapter_id: str = ""
    pack_id: str = ""
    workflow_id: str = ""
    step_index: int = 0
    parent_job_id: UUID | None = None
    memory_id: str = ""
    context_hints: ContextHints | None = None
    compensation: Compensation | None = None
    idempotency_key: str = ""
    max_wait_s: float = 0.0
    """The job fails if none of its frames is dispatched within this time; 0: no limit."""
    run_at: AwareDatetime | None = None
    after: tuple[UUID, ...] = ()
    """Jobs that must end before this one is queued."""
    after_failed: AfterFailed = "cancel"
    max_cores: int | float | str | None = None
    max_gpus: int | None = None


class SubmitResult(msgspec.Struct, frozen=True):
    job: JobId
    state: JobState | None
    """None: the job of an old idempotency key that is past its retention."""
    already: bool = False
    """Whether it existed before, under the same idempotency key."""


class ResubmitResult(msgspec.Struct, frozen=True):
    """A new job for the frames of an ended one."""

    old: JobId
    job: JobId
    frames: int


class SubmissionDetails(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The parts of a submission that have no column in the job and layer tables."""

    env: dict[str, str] = {}
    context: Any = None
    budget: Budget | None = None
    requires: tuple[str, ...] = ()
    capability: str = ""
    risk_tags: tuple[str, ...] = ()
    actor_id: str = ""
    actor_type: ActorType = ""
    tenant: str = ""
    principal: str = ""
    adapter_id: str = ""
    pack_id: str = ""
    step_index: int = 0
    parent_job_id: UUID | None = None
    memory_id: str = ""
    context_hints: ContextHints | None = None
    compensation: Compensation | None = None
    idempotency_key: str = ""
    max_wait_s: float = 0.0
    after: tuple[UUID, ...] = ()
    maps: tuple[int, ...] = ()
    """Indexes of the layers whose frames each have their own item."""
    trace: str = ""
    """The traceparent of the submission if it is traced."""
    items_at: str = ""
    """Pointer to the items of these layers, for resubmitting the whole job."""


_ENCODER = msgspec.msgpack.Encoder()
_CANONICAL = msgspec.msgpack.Encoder(order="deterministic")
_MSGPACK = msgspec.msgpack.Decoder(Submission)
_JSON = msgspec.json.Decoder(Submission)
_DETAILS = msgspec.msgpack.Decoder(SubmissionDetails)


def encode_submission(submission: Submission) -> bytes:
    """As msgpack; raises InvalidInput for values that cannot be encoded."""
    try:
        return _ENCODER.encode(submission)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidInput(f"The submission cannot be encoded: {_error_text(error)}.") from error


def decode_submission(data: bytes) -> Submission:
    """Decode a submission from msgpack or JSON."""
    if len(data) > SUBMISSION_BYTES_MAX:
        raise InvalidInput(
            f"The submission has {len(data)} bytes, at most {SUBMISSION_BYTES_MAX} are allowed: put large inputs into"
            " the store and submit their pointers."
        )
    try:
        return (_JSON if data[:1].isspace() or data[:1] == b"{" else _MSGPACK).decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidInput(
            f"A message of {len(data)} bytes is not a valid submission: {_error_text(error)}."
        ) from error


def canonical_bytes(submission: Submission) -> bytes:
    """Equal bytes for equal submissions, regardless of map order."""
    return _CANONICAL.encode(submission)


def encode_details(details: SubmissionDetails) -> bytes | None:
    return None if details == SubmissionDetails() else _ENCODER.encode(details)


def decode_details(data: bytes | None) -> SubmissionDetails:
    return SubmissionDetails() if data is None else _DETAILS.decode(data)


def _error_text(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error)[:300].rstrip(".")
