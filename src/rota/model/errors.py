"""Every error Rota raises on purpose.

    RotaError
    ├── InvalidInput           the caller's input is wrong; nothing was changed
    │   ├── InvalidSetting     a key or value in the settings file or the environment
    │   ├── NotFound           no object has that name or id, or it is past its retention
    │   └── TooLarge           more than is accepted in one call
    ├── SetupFailed            this machine or a server cannot run Rota; the sentence says what to do
    │   ├── ExtraMissing       a package is not installed, because it belongs to an extra of Rota
    │   ├── BinaryMissing      no usable server binary was found
    │   ├── DataDirInUse       another process owns the data directory
    │   ├── DataDirVersion     the data directory belongs to another major version
    │   ├── PortTaken          an explicitly configured port is not free
    │   ├── DiskFull           no space left for the data directory
    │   ├── ServerFailed       a local server did not start, or exited
    │   ├── LoginRefused       a server was reached and rejected the credentials
    │   ├── EvictingRedis      a Redis that may evict keys cannot hold the accounting data
    │   └── MigrationRefused   the database schema and this version of Rota do not match
    ├── Unavailable            a server does not answer in time; the same call may succeed later
    │   ├── PostgresUnavailable
    │   ├── RedisUnavailable
    │   ├── NatsUnavailable
    │   └── BreakerOpen        refused without a call, because the last calls failed
    ├── InvalidPolicyResponse  the safety kernel's reply does not match the request
    ├── BlobCorrupted          the stored content of a pointer differs from what was written
    ├── ScriptFailed           a Redis script ended with an error: a defect, or a key of the wrong type
    ├── JobNotSucceeded        the result of a job was requested, and it has none
    │   ├── JobFailed          a frame failed, or the job could not be run
    │   ├── JobTimedOut        past its deadline, or a frame past its timeout
    │   ├── JobCancelled       a user cancelled it
    │   ├── JobDenied          the policy denied it
    │   └── JobQuarantined     it succeeded, and the output policy withholds its result
    ├── RunNotSucceeded        the output of a workflow run was requested, and the run did not succeed
    └── Refused                the call is valid and not allowed now
        ├── LeaseHeld          another holder has the lease; try again later
        ├── LeaseLost          the lease expired or was taken over during the work
        ├── StaleFence         a guarded write with a fencing token that PostgreSQL no longer accepts
        ├── BlobMissing        the content of a pointer is past its retention
        ├── OutputHeld         an output is not readable before it was scanned
        ├── OutputQuarantined  an output is withheld by the output policy
        ├── IllegalTransition  the job's state does not allow this transition
        ├── NotEnded           a job or run did not end within the waiting time
        ├── IdempotencyConflict  the key was used for a different submission
        ├── RateLimited        too many requests; `facts["retry_after_s"]` says when to retry
        ├── Unauthenticated    missing or wrong credentials in a call to Rota; `facts["reason"]` says which
        ├── ApprovalResolved   the approval has already been decided
        ├── ApprovalNotActionable  the subject no longer waits for this approval
        ├── ApprovalStale      the stored subject differs from the one the approval was requested for
        └── Forbidden          the credentials are valid and do not allow this
            └── SelfApprovalDenied  submitters cannot approve their own submissions

`code` is stable: CLI, API, logs and metrics use it. The sentence says what is wrong and what to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar
from uuid import UUID


class RotaError(Exception):
    """Base class. `facts` are for logs and the API; they never contain secrets."""

    code: ClassVar[str] = "rota_error"

    def __init__(self, sentence: str, **facts: object) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.facts = facts


class InvalidInput(RotaError):
    code = "invalid_input"


class InvalidSetting(InvalidInput):
    code = "invalid_setting"


class NotFound(InvalidInput):
    code = "not_found"


class TooLarge(InvalidInput):
    code = "too_large"


class SetupFailed(RotaError):
    code = "setup_failed"


class ExtraMissing(SetupFailed):
    code = "extra_missing"


class BinaryMissing(SetupFailed):
    code = "binary_missing"


class DataDirInUse(SetupFailed):
    code = "data_dir_in_use"


class DataDirVersion(SetupFailed):
    code = "data_dir_version"


class PortTaken(SetupFailed):
    code = "port_taken"


class DiskFull(SetupFailed):
    code = "disk_full"


class ServerFailed(SetupFailed):
    code = "server_failed"


class LoginRefused(SetupFailed):
    code = "login_refused"


class EvictingRedis(SetupFailed):
    code = "evicting_redis"


class MigrationRefused(SetupFailed):
    code = "migration_refused"


class Unavailable(RotaError):
    code = "unavailable"


class PostgresUnavailable(Unavailable):
    code = "postgres_unavailable"


class PostgresBusy(PostgresUnavailable):
    """It answered that it lacks a lock, time or resources at the moment. Nothing took effect."""

    code = "postgres_busy"


class RedisUnavailable(Unavailable):
    code = "redis_unavailable"


class NatsUnavailable(Unavailable):
    code = "nats_unavailable"


class BreakerOpen(Unavailable):
    code = "breaker_open"


class InvalidPolicyResponse(RotaError):
    code = "policy_garbled"


class BlobCorrupted(RotaError):
    code = "blob_damaged"


class ScriptFailed(RotaError):
    """`facts["word"]` is CODE of `redis.error_reply("CODE sentence")`, or ERR if Lua itself failed."""

    code = "script_failed"


@dataclass(frozen=True, slots=True, kw_only=True)  # not a struct: every command of the CLI imports this module
class FrameFailure:
    """The last attempt of a frame that did not succeed."""

    layer: str = ""
    frame: int | None = None
    """Its number in the layer; None: there is no such frame."""
    attempt: int = 0
    error: str = ""
    """Its error message, such as `ValueError: no luck`."""
    traceback: str = ""
    """As written to the frame's log; empty if there is none."""


class JobNotSucceeded(RotaError):
    """`reason` is the code of the failed frame, such as `exception`, or else that of the job.

    `layer`, `frame`, `attempt`, `error` and `traceback` are those of `failed`, the first frame that ended this way.
    """

    code = "job_not_succeeded"

    def __init__(
        self, sentence: str, *, job: UUID | None = None, reason: str = "", failed: FrameFailure | None = None
    ) -> None:
        failed = failed or FrameFailure()
        super().__init__(
            sentence, job=str(job), reason=reason, layer=failed.layer, frame=failed.frame, attempt=failed.attempt
        )
        self.job = job
        self.reason = reason
        self.layer = failed.layer
        self.frame = failed.frame
        self.attempt = failed.attempt
        self.error = failed.error
        self.traceback = failed.traceback


class JobFailed(JobNotSucceeded):
    code = "job_failed"


class JobTimedOut(JobNotSucceeded):
    code = "job_timed_out"


class JobCancelled(JobNotSucceeded):
    code = "job_cancelled"


class JobDenied(JobNotSucceeded):
    code = "job_denied"


class JobQuarantined(JobNotSucceeded):
    code = "job_quarantined"


class RunNotSucceeded(RotaError):
    """`state` is the run's terminal state, `step` the first step that ended this way, if any."""

    code = "run_not_succeeded"

    def __init__(
        self, sentence: str, *, run: UUID | None = None, state: str = "", step: str = "", error: str = ""
    ) -> None:
        super().__init__(sentence, run=str(run), state=state, step=step)
        self.run = run
        self.state = state
        self.step = step
        self.error = error
        """The cause, as a sentence."""


class Refused(RotaError):
    code = "refused"


class LeaseHeld(Refused):
    code = "lease_held"


class LeaseLost(Refused):
    code = "lease_lost"


class StaleFence(Refused):
    code = "stale_fence"


class BlobMissing(Refused):
    code = "blob_missing"


class OutputHeld(Refused):
    code = "output_held"


class OutputQuarantined(Refused):
    code = "output_quarantined"


class IllegalTransition(Refused):
    code = "illegal_transition"


class NotEnded(Refused):
    code = "not_ended"


class IdempotencyConflict(Refused):
    code = "idempotency_conflict"


class NameTaken(Refused):
    code = "name_taken"


class PrincipalDisabled(Refused):
    code = "principal_disabled"


class RateLimited(Refused):
    code = "rate_limited"


class Unauthenticated(Refused):
    code = "unauthenticated"


class Forbidden(Refused):
    code = "forbidden"


class SelfApprovalDenied(Forbidden):
    code = "self_approval_denied"


class ApprovalResolved(Refused):
    code = "approval_already_resolved"


class ApprovalNotActionable(Refused):
    code = "approval_not_actionable"


class ApprovalStale(Refused):
    code = "approval_stale_request"
