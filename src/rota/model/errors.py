"""Every error Rota raises on purpose.

    RotaError
    ├── InvalidInput           what the caller gave is wrong; nothing was changed
    │   ├── InvalidSetting     a key or value in the settings file or the environment
    │   ├── NotFound           nothing goes by that name or id, or it is not kept any more
    │   └── TooLarge           more than is taken at once
    ├── SetupFailed            this machine or a server is not fit to run Rota; says what to do
    │   ├── BinaryMissing      no usable server binary was found
    │   ├── DataDirInUse       another process owns the data directory
    │   ├── DataDirVersion     the data directory was made by another major version
    │   ├── PortTaken          a port that was asked for by number is not free
    │   ├── DiskFull           no room where the data directory lies
    │   ├── ServerFailed       a local server did not start, or died
    │   ├── LoginRefused       a server was reached and refused the credentials
    │   ├── EvictingRedis      a Redis that may drop keys cannot hold the books
    │   └── MigrationRefused   the database's schema and this Rota do not fit each other
    ├── Unavailable            a server does not answer in time; the same call may work later
    │   ├── PostgresUnavailable
    │   ├── RedisUnavailable
    │   ├── NatsUnavailable
    │   └── BreakerOpen        refused at once, because the last calls failed
    ├── PolicyGarbled          the safety kernel answered what it was not asked
    ├── BlobDamaged            what the store holds under a pointer is not what was written
    ├── ScriptFailed           a Redis script ended with an error: a defect, or a key of the wrong type
    ├── JobNotSucceeded        its result was asked for, and there is none
    │   ├── JobFailed          a frame failed, or the job could not be run
    │   ├── JobTimedOut        past its deadline, or a frame past its timeout
    │   ├── JobCancelled       somebody cancelled it
    │   ├── JobDenied          the policy did not let it run
    │   └── JobQuarantined     it succeeded, and the policy keeps back what it returned
    ├── RunNotSucceeded        what a run of a workflow returned was asked for, and it did not succeed
    └── Refused                the call was understood and is not allowed now
        ├── LeaseHeld          somebody else has it; try again later
        ├── LeaseLost          the lease ran out or went to somebody else while work was under way
        ├── StaleFence         a guarded write by a holder that PostgreSQL no longer knows
        ├── BlobMissing        what a pointer names is not kept any more
        ├── OutputHeld         what a frame returned is not readable before it was scanned
        ├── OutputQuarantined  what a frame returned is kept back by the output policy
        ├── IllegalTransition  a job in this state cannot become that
        ├── NotEnded           a job or run has not ended within the time that was waited for it
        ├── IdempotencyConflict  the key was used for another submission
        ├── RateLimited        too much at once; `facts["retry_after_s"]` says when it may work
        ├── Unauthenticated    missing or wrong credentials in a call to us; `facts["reason"]` says which
        ├── ApprovalResolved   what was to be approved has been decided
        ├── ApprovalNotActionable  what was to be approved does not wait for it any more
        ├── ApprovalStale      what is stored is not what was asked to be approved
        └── Forbidden          the credentials are good, and do not allow this
            └── SelfApprovalDenied  whoever submits does not approve

`code` is stable: the CLI, the API, logs and metrics use it. The sentence says what is wrong and what to do next.
"""

from __future__ import annotations

from typing import ClassVar
from uuid import UUID


class RotaError(Exception):
    """Base of the tree above. `facts` are for logs and the API; they never hold secrets."""

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
    """`facts["word"]` is CODE of `redis.error_reply("CODE sentence")`, or ERR when Lua itself failed."""

    code = "script_failed"


class JobNotSucceeded(RotaError):
    """`reason` is the word its frame ended with, such as `exception`, or else that of the job; `frame` is the first one
    that ended like this, if any did."""

    code = "job_not_succeeded"

    def __init__(
        self,
        sentence: str,
        *,
        job: UUID | None = None,
        reason: str = "",
        layer: str = "",
        frame: int | None = None,
        attempt: int = 0,
        error: str = "",
        traceback: str = "",
    ) -> None:
        super().__init__(sentence, job=str(job), reason=reason, layer=layer, frame=frame, attempt=attempt)
        self.job = job
        self.reason = reason
        self.layer = layer
        self.frame = frame
        self.attempt = attempt
        self.error = error
        """What the frame said, as `ValueError: no luck`."""
        self.traceback = traceback
        """As its log has it; empty when there is none."""


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
    """`state` is how it ended, `step` the first one that ended like this, if any did."""

    code = "run_not_succeeded"

    def __init__(
        self, sentence: str, *, run: UUID | None = None, state: str = "", step: str = "", error: str = ""
    ) -> None:
        super().__init__(sentence, run=str(run), state=state, step=step)
        self.run = run
        self.state = state
        self.step = step
        self.error = error
        """Why, in a sentence."""


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
