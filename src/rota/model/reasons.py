"""Reason codes: why a job or run waits, or why it ended other than by its own result. No I/O.

The same code is the `reason` of a job, a metric label, the code of a dead letter, and what `rota explain` and the
dashboard show. Why one attempt of a frame failed is an `AttemptCode`.

Reasons in `WAITING_REASONS` leave the job where it is until something changes and count nothing against it. All others
end something: an attempt to dispatch, an attempt to run, or the job.

Waiting reasons have a tier; a higher tier must be resolved first: more capacity does not help a job without a pool, and
a better queue position does not help a paused one.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final

from rota.model.quota import Level


class Tier(StrEnum):
    """Kind of obstacle, in the order of resolution."""

    MISCONFIGURED = "misconfigured"
    BLOCKED = "blocked"
    QUOTA = "quota"
    CAPACITY = "capacity"
    ORDER = "order"
    SYSTEM = "system"

    @property
    def rank(self) -> int:
        return _RANKS[self]


_RANKS: Final = {tier: rank for rank, tier in enumerate(Tier)}


class Reason(StrEnum):
    NO_POOL_MAPPING = "no_pool_mapping"
    UNKNOWN_TASK = "unknown_task"
    NO_WORKERS = "no_workers"
    POOL_OVERLOADED = "pool_overloaded"
    TENANT_LIMIT = "tenant_limit"
    QUOTA_SUBSCRIPTION = "quota_subscription"
    QUOTA_FOLDER = "quota_folder"
    QUOTA_JOB = "quota_job"
    QUOTA_LAYER = "quota_layer"
    QUOTA_POINT = "quota_point"
    POLICY_PENDING = "policy_pending"
    POLICY_UNAVAILABLE = "policy_unavailable"
    POLICY_THROTTLED = "policy_throttled"
    WAITING_ON_JOB = "waiting_on_job"
    JOB_BEFORE_FAILED = "job_before_failed"
    FRAME_FAILED = "frame_failed"
    APPROVAL_REQUIRED = "approval_required"
    APPROVED = "approved"
    WAITING_ON_RUN = "waiting_on_run"
    RUN_PAUSED = "run_paused"
    COMPENSATING = "compensating"
    NEWS_WAITING = "news_waiting"
    PAUSED = "paused"
    DEFERRED = "deferred"
    ENDING = "ending"
    FAIR_SHARE = "fair_share"
    BEHIND = "behind"
    QUEUED = "queued"
    BOOKS_UNAVAILABLE = "books_unavailable"
    BUS_UNAVAILABLE = "bus_unavailable"
    NO_SERVER = "no_server"
    SAFETY_DENIED = "safety_denied"
    APPROVAL_REJECTED = "approval_rejected"
    APPROVAL_EXPIRED = "approval_expired"
    APPROVAL_STALE = "approval_stale_request"
    MAX_RETRIES_EXCEEDED = "max_retries_exceeded"
    DISPATCH_FAILED = "dispatch_failed"
    MAX_WAIT_EXPIRED = "max_wait_expired"
    DEADLINE_EXPIRED = "deadline_expired"
    DISPATCH_TIMEOUT = "dispatch_timeout"
    RUNNING_TIMEOUT = "running_timeout"
    WORKER_LOST = "worker_lost"
    CANCELLED = "cancelled"
    OUTPUT_QUARANTINED = "output_quarantined"
    OUTPUT_QUARANTINED_ASYNC = "output_quarantined_async"

    @property
    def meaning(self) -> str:
        return MEANINGS[self]

    @property
    def tier(self) -> Tier | None:
        """None if no job waits for this reason."""
        return TIERS.get(self)

    @property
    def waits(self) -> bool:
        return self in WAITING_REASONS

    def remedy(self, **names: str) -> str:
        """The remedy with `names` inserted for the placeholders; placeholders without a name stay in capitals."""
        return _PLACEHOLDER.sub(lambda found: names.get(found[1].lower(), found[1]), REMEDIES[self])

    @classmethod
    def of_level(cls, level: Level) -> Reason:
        """The reason for a booking refused by a limit at `level`."""
        return cls(f"quota_{level}")


class DeadLetterReason(StrEnum):
    """Reasons of dead letters of bus messages and compensations. Those of jobs and outputs have a `Reason`, those of
    frames a `Reason` or an `AttemptCode`."""

    UNREADABLE_MESSAGE = "unreadable_message"
    DELIVERIES_EXHAUSTED = "deliveries_exhausted"
    SUBMISSION_REFUSED = "submission_refused"
    SAGA_UNREADABLE = "saga_unmarshal_failed"
    SAGA_FAILED = "saga_compensation_failed"
    SAGA_DENIED = "saga_compensation_denied"


MEANINGS: Final[dict[Reason, str]] = {
    Reason.NO_POOL_MAPPING: "No pool is mapped to its topic, or none of the mapped pools provides what it requires.",
    Reason.UNKNOWN_TASK: "Its pools have workers, but none of them has its task.",
    Reason.NO_WORKERS: "A pool is mapped, but it has no live worker that matches.",
    Reason.POOL_OVERLOADED: "Workers match, but all of them are full or busy with other work.",
    Reason.TENANT_LIMIT: "Its show already runs its maximum number of jobs.",
    Reason.QUOTA_SUBSCRIPTION: "Its show has used up its burst in the pool.",
    Reason.QUOTA_FOLDER: "Its folder is at its cap.",
    Reason.QUOTA_JOB: "The job is at its own cap.",
    Reason.QUOTA_LAYER: "The layer is at its cap.",
    Reason.QUOTA_POINT: "Its department is at its cap in this show.",
    Reason.POLICY_PENDING: "The policy decision is pending.",
    Reason.POLICY_UNAVAILABLE: "The safety kernel currently returns no decision.",
    Reason.POLICY_THROTTLED: "The policy throttles it, because too many jobs of this kind were submitted.",
    Reason.WAITING_ON_JOB: "Another job must end first.",
    Reason.JOB_BEFORE_FAILED: "A job that it depends on did not succeed.",
    Reason.FRAME_FAILED: "One of its frames failed, and it was submitted with fail_fast.",
    Reason.APPROVAL_REQUIRED: "It requires approval.",
    Reason.APPROVED: "It was approved; a server admits it within moments.",
    Reason.WAITING_ON_RUN: "A child run must end first.",
    Reason.RUN_PAUSED: "The run is paused: no further step begins.",
    Reason.COMPENSATING: "The run failed, and its completed work is being undone.",
    Reason.NEWS_WAITING: "The run has unprocessed messages; a server processes them within moments.",
    Reason.PAUSED: "Its queue is paused.",
    Reason.DEFERRED: "Its start time has not come: a delay, or the pause before a retry.",
    Reason.ENDING: "It is being ended: no more of its frames start.",
    Reason.FAIR_SHARE: "Shows that use less of their size go first.",
    Reason.BEHIND: "Frames with a higher priority or an earlier submission go first.",
    Reason.QUEUED: "Nothing blocks it: a server dispatches it within moments.",
    Reason.BOOKS_UNAVAILABLE: "Its show cannot be booked now: Redis is unavailable or being seeded.",
    Reason.BUS_UNAVAILABLE: "NATS is unavailable, so nothing can be assigned to a worker.",
    Reason.NO_SERVER: "No server is running, so nothing starts.",
    Reason.SAFETY_DENIED: "The policy denied it.",
    Reason.APPROVAL_REJECTED: "An approver rejected it.",
    Reason.APPROVAL_EXPIRED: "It did not get enough approvals in time.",
    Reason.APPROVAL_STALE: "The stored job differs from the one the approval was requested for.",
    Reason.MAX_RETRIES_EXCEEDED: "It failed, and its retry policy allows no further attempt.",
    Reason.DISPATCH_FAILED: "It could not be assigned to a worker within the allowed number of tries.",
    Reason.MAX_WAIT_EXPIRED: "None of its frames was dispatched within its max_wait.",
    Reason.DEADLINE_EXPIRED: "Its deadline has passed.",
    Reason.DISPATCH_TIMEOUT: "Its assignment never reached its worker.",
    Reason.RUNNING_TIMEOUT: "It ran longer than its timeout.",
    Reason.WORKER_LOST: "Its worker stopped sending heartbeats.",
    Reason.CANCELLED: "A user cancelled it.",
    Reason.OUTPUT_QUARANTINED: "The output policy withholds its output.",
    Reason.OUTPUT_QUARANTINED_ASYNC: "The output policy withholds its output, after a scan of the content.",
}

TIERS: Final[dict[Reason, Tier]] = {
    Reason.NO_POOL_MAPPING: Tier.MISCONFIGURED,
    Reason.UNKNOWN_TASK: Tier.MISCONFIGURED,
    Reason.POLICY_PENDING: Tier.BLOCKED,
    Reason.POLICY_UNAVAILABLE: Tier.BLOCKED,
    Reason.POLICY_THROTTLED: Tier.BLOCKED,
    Reason.WAITING_ON_JOB: Tier.BLOCKED,
    Reason.APPROVAL_REQUIRED: Tier.BLOCKED,
    Reason.APPROVED: Tier.BLOCKED,
    Reason.WAITING_ON_RUN: Tier.BLOCKED,
    Reason.RUN_PAUSED: Tier.BLOCKED,
    Reason.COMPENSATING: Tier.BLOCKED,
    Reason.PAUSED: Tier.BLOCKED,
    Reason.DEFERRED: Tier.BLOCKED,
    Reason.ENDING: Tier.BLOCKED,
    Reason.TENANT_LIMIT: Tier.QUOTA,
    Reason.QUOTA_SUBSCRIPTION: Tier.QUOTA,
    Reason.QUOTA_FOLDER: Tier.QUOTA,
    Reason.QUOTA_JOB: Tier.QUOTA,
    Reason.QUOTA_LAYER: Tier.QUOTA,
    Reason.QUOTA_POINT: Tier.QUOTA,
    Reason.NO_WORKERS: Tier.CAPACITY,
    Reason.POOL_OVERLOADED: Tier.CAPACITY,
    Reason.FAIR_SHARE: Tier.ORDER,
    Reason.BEHIND: Tier.ORDER,
    Reason.QUEUED: Tier.ORDER,
    Reason.NEWS_WAITING: Tier.ORDER,
    Reason.BOOKS_UNAVAILABLE: Tier.SYSTEM,
    Reason.BUS_UNAVAILABLE: Tier.SYSTEM,
    Reason.NO_SERVER: Tier.SYSTEM,
    Reason.DISPATCH_FAILED: Tier.SYSTEM,
}

REMEDIES: Final[dict[Reason, str]] = {
    Reason.NO_POOL_MAPPING: "`rota pool map TOPIC POOL` maps a pool that provides what it requires.",
    Reason.UNKNOWN_TASK: "Start a worker that has TASK with `rota worker APP`, or submit it under its correct name.",
    Reason.NO_WORKERS: "`rota worker --pool POOL` starts one; `rota workers` lists live workers.",
    Reason.POOL_OVERLOADED: "It starts when frames there end; `rota worker --pool POOL` elsewhere adds capacity.",
    Reason.TENANT_LIMIT: "`rota show set SHOW --max-jobs N` raises the limit; it also starts when another job ends.",
    Reason.QUOTA_SUBSCRIPTION: "`rota sub set SHOW POOL --BURST N` raises the limit; frames that end free quota.",
    Reason.QUOTA_FOLDER: "`rota folder set SHOW FOLDER --max-WHAT N` raises the limit; frames that end free quota.",
    Reason.QUOTA_JOB: "`rota job set SHOW JOB --max-WHAT N` raises the limit; frames that end free quota.",
    Reason.QUOTA_LAYER: "`rota layer set SHOW LAYER --max-WHAT N` raises the limit; frames that end free quota.",
    Reason.QUOTA_POINT: "`rota dept set SHOW DEPT --max-WHAT N` raises the limit; frames that end free quota.",
    Reason.POLICY_PENDING: "Wait a moment; if it persists, check with `rota status` that a server is running.",
    Reason.POLICY_UNAVAILABLE: "Restart the safety kernel; the check is repeated automatically.",
    Reason.POLICY_THROTTLED: "Wait: the check is repeated automatically after the delay of its rule.",
    Reason.WAITING_ON_JOB: "`rota explain JOB` shows why that job has not ended.",
    Reason.JOB_BEFORE_FAILED: "`rota explain JOB` shows why that job did not succeed; fix it, and submit both again.",
    Reason.FRAME_FAILED: "`rota job show JOB` shows the frame and its error: fix that, and submit it again.",
    Reason.APPROVAL_REQUIRED: "`rota approvals approve JOB` by an approver who did not submit it.",
    Reason.APPROVED: "Wait a moment; if it persists, check with `rota status` that a server is running.",
    Reason.WAITING_ON_RUN: "`rota explain RUN` shows what that run waits for.",
    Reason.RUN_PAUSED: "`rota workflow resume RUN` lets steps begin again.",
    Reason.COMPENSATING: "Wait; once it has ended, `rota workflow rollback RUN` retries what was not undone.",
    Reason.NEWS_WAITING: "Nothing to do; if it persists, check with `rota status` that a server is running.",
    Reason.PAUSED: "`rota queue resume QUEUE` resumes it.",
    Reason.DEFERRED: "Wait until then, or cancel it with `rota job cancel JOB` and submit it without a delay.",
    Reason.ENDING: "Wait until its frames have stopped; `rota job wait JOB` returns then.",
    Reason.FAIR_SHARE: "A larger `rota sub set SHOW POOL --size N` moves it forward.",
    Reason.BEHIND: "A higher --priority at submission moves a job forward; so does waiting.",
    Reason.QUEUED: "Nothing to do.",
    Reason.BOOKS_UNAVAILABLE: "Restore Redis: it is seeded automatically. `rota ledger audit` checks the ledger.",
    Reason.BUS_UNAVAILABLE: "Restore NATS; servers reconnect automatically.",
    Reason.NO_SERVER: "Start `rota up` or `rota server`.",
    Reason.SAFETY_DENIED: "Change the job or the policy, then submit it again; `rota explain JOB` names the rule.",
    Reason.APPROVAL_REJECTED: "Ask the approver why, change the job, and submit it again.",
    Reason.APPROVAL_EXPIRED: "Submit it again, and get it approved in time.",
    Reason.APPROVAL_STALE: "Find out what changed the stored job, then submit it again.",
    Reason.MAX_RETRIES_EXCEEDED: "Fix the cause of the failure, then retry it with `rota dlq retry`.",
    Reason.DISPATCH_FAILED: "Check the logs of the servers and of NATS; `rota dlq retry` retries it.",
    Reason.MAX_WAIT_EXPIRED: "Submit it again with a longer --max-wait, or see why it waited with `rota explain`.",
    Reason.DEADLINE_EXPIRED: "Submit it again with a later --deadline.",
    Reason.DISPATCH_TIMEOUT: "Nothing to do: it is dispatched again. If it repeats, check the log of the worker.",
    Reason.RUNNING_TIMEOUT: "Increase its --timeout, or make it faster.",
    Reason.WORKER_LOST: "Check that machine; the frame is retried as often as allowed.",
    Reason.CANCELLED: "Submit it again if that was a mistake.",
    Reason.OUTPUT_QUARANTINED: "`rota outputs release OUTPUT` or `rota outputs redact OUTPUT` makes it readable.",
    Reason.OUTPUT_QUARANTINED_ASYNC: "`rota outputs release OUTPUT` or `rota outputs redact OUTPUT` makes it readable.",
}
"""Words in capitals are placeholders for names."""

_PLACEHOLDER: Final = re.compile(r"\b(TOPIC|POOL|TASK|APP|SHOW|FOLDER|DEPT|JOB|RUN|STEP|LAYER|QUEUE|BURST|WHAT|N)\b")

WAITING_REASONS: Final = frozenset(
    {
        Reason.NO_WORKERS,
        Reason.UNKNOWN_TASK,
        Reason.POOL_OVERLOADED,
        Reason.TENANT_LIMIT,
        Reason.QUOTA_SUBSCRIPTION,
        Reason.QUOTA_FOLDER,
        Reason.QUOTA_JOB,
        Reason.QUOTA_LAYER,
        Reason.QUOTA_POINT,
        Reason.POLICY_PENDING,
        Reason.POLICY_UNAVAILABLE,
        Reason.POLICY_THROTTLED,
        Reason.WAITING_ON_JOB,
        Reason.APPROVAL_REQUIRED,
        Reason.APPROVED,
        Reason.WAITING_ON_RUN,
        Reason.RUN_PAUSED,
        Reason.COMPENSATING,
        Reason.NEWS_WAITING,
        Reason.PAUSED,
        Reason.DEFERRED,
        Reason.FAIR_SHARE,
        Reason.BEHIND,
        Reason.QUEUED,
        Reason.BOOKS_UNAVAILABLE,
        Reason.BUS_UNAVAILABLE,
        Reason.NO_SERVER,
    }
)
