"""Why a job waits, or ended otherwise than by its own doing: one word each. No I/O.

The same word is the `reason` of a job, the label of a metric, the code of a dead letter, and what `rota explain` and
the dashboard show.

`waits`: the job stays where it is and is looked at again when something changes; nothing is counted against it. All
other reasons end something: an attempt to dispatch, an attempt to run, or the job.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from rota.model.quota import Level


class Reason(StrEnum):
    NO_POOL_MAPPING = "no_pool_mapping"
    NO_WORKERS = "no_workers"
    POOL_OVERLOADED = "pool_overloaded"
    TENANT_LIMIT = "tenant_limit"
    QUOTA_SUBSCRIPTION = "quota_subscription"
    QUOTA_FOLDER = "quota_folder"
    QUOTA_JOB = "quota_job"
    QUOTA_LAYER = "quota_layer"
    QUOTA_POINT = "quota_point"
    BOOKS_UNAVAILABLE = "books_unavailable"
    POLICY_UNAVAILABLE = "policy_unavailable"
    WAITING_ON_JOB = "waiting_on_job"
    APPROVAL_REQUIRED = "approval_required"
    PAUSED = "paused"
    SAFETY_DENIED = "safety_denied"
    DISPATCH_FAILED = "dispatch_failed"
    MAX_WAIT_EXPIRED = "max_wait_expired"
    DEADLINE_EXPIRED = "deadline_expired"
    DISPATCH_TIMEOUT = "dispatch_timeout"
    RUNNING_TIMEOUT = "running_timeout"
    WORKER_LOST = "worker_lost"
    CANCELLED = "cancelled"

    @property
    def meaning(self) -> str:
        return MEANINGS[self]

    @property
    def waits(self) -> bool:
        return self in WAITING

    @classmethod
    def of_level(cls, level: Level) -> Reason:
        """Of a limit that refused a booking."""
        return cls(f"quota_{level}")


MEANINGS: Final[dict[Reason, str]] = {
    Reason.NO_POOL_MAPPING: "No pool is mapped to its topic, or none of those provides what it requires.",
    Reason.NO_WORKERS: "A pool is mapped, and no live worker of it matches.",
    Reason.POOL_OVERLOADED: "Workers match, and all of them are full or busy with other work.",
    Reason.TENANT_LIMIT: "Its show runs as many jobs at once as it may.",
    Reason.QUOTA_SUBSCRIPTION: "Its show has used up its burst in the pool.",
    Reason.QUOTA_FOLDER: "Its folder is at its cap.",
    Reason.QUOTA_JOB: "The job is at its own cap.",
    Reason.QUOTA_LAYER: "The layer is at its cap.",
    Reason.QUOTA_POINT: "Its department is at its cap in this show.",
    Reason.BOOKS_UNAVAILABLE: "The books of its show cannot be written now: Redis is away or being seeded.",
    Reason.POLICY_UNAVAILABLE: "The safety kernel gives no decision now.",
    Reason.WAITING_ON_JOB: "Another job must end first.",
    Reason.APPROVAL_REQUIRED: "Somebody must approve it.",
    Reason.PAUSED: "Its queue is paused.",
    Reason.SAFETY_DENIED: "The policy does not let it run.",
    Reason.DISPATCH_FAILED: "It could not be handed to a worker, as often as was tried.",
    Reason.MAX_WAIT_EXPIRED: "No frame of it was dispatched within its max_wait.",
    Reason.DEADLINE_EXPIRED: "Its deadline has passed.",
    Reason.DISPATCH_TIMEOUT: "Its worker never said that it started.",
    Reason.RUNNING_TIMEOUT: "It ran for longer than it may.",
    Reason.WORKER_LOST: "Its worker fell silent.",
    Reason.CANCELLED: "Somebody cancelled it.",
}

WAITING: Final = frozenset(
    {
        Reason.NO_WORKERS,
        Reason.POOL_OVERLOADED,
        Reason.TENANT_LIMIT,
        Reason.QUOTA_SUBSCRIPTION,
        Reason.QUOTA_FOLDER,
        Reason.QUOTA_JOB,
        Reason.QUOTA_LAYER,
        Reason.QUOTA_POINT,
        Reason.BOOKS_UNAVAILABLE,
        Reason.POLICY_UNAVAILABLE,
        Reason.WAITING_ON_JOB,
        Reason.APPROVAL_REQUIRED,
        Reason.PAUSED,
    }
)
