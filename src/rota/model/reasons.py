"""Reason codes: why a job or run waits, or why it ended other than by its own result. No I/O.

The same code is the `reason` of a job, a metric label, the code of a dead letter, and what `rota explain` and the
dashboard show.

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


MEANINGS: Final[dict[Reason, str]] = {
    Reason.NO_POOL_MAPPING: "No pool is mapped to its topic, or none of those provides what it requires.",
    Reason.UNKNOWN_TASK: "Its pools have workers, and none of them knows its task.",
    Reason.NO_WORKERS: "A pool is mapped, and no live worker of it matches.",
    Reason.POOL_OVERLOADED: "Workers match, and all of them are full or busy with other work.",
    Reason.TENANT_LIMIT: "Its show runs as many jobs at once as it may.",
    Reason.QUOTA_SUBSCRIPTION: "Its show has used up its burst in the pool.",
    Reason.QUOTA_FOLDER: "Its folder is at its cap.",
    Reason.QUOTA_JOB: "The job is at its own cap.",
    Reason.QUOTA_LAYER: "The layer is at its cap.",
    Reason.QUOTA_POINT: "Its department is at its cap in this show.",
    Reason.POLICY_PENDING: "The policy has not decided about it yet.",
    Reason.POLICY_UNAVAILABLE: "The safety kernel gives no decision now.",
    Reason.POLICY_THROTTLED: "The policy lets it wait, since too much of this kind was asked for.",
    Reason.WAITING_ON_JOB: "Another job must end first.",
    Reason.JOB_BEFORE_FAILED: "A job that it waited for did not succeed.",
    Reason.FRAME_FAILED: "One of its frames failed, and it was submitted to end with the first that does.",
    Reason.APPROVAL_REQUIRED: "Somebody must approve it.",
    Reason.WAITING_ON_RUN: "A run inside of it must end first.",
    Reason.RUN_PAUSED: "Somebody has paused the run: no step of it begins.",
    Reason.COMPENSATING: "The run failed, and what it did is being undone.",
    Reason.NEWS_WAITING: "Something has happened to the run that is taken up when a server next looks, within moments.",
    Reason.PAUSED: "Its queue is paused.",
    Reason.DEFERRED: "Its time has not come: a delay, or the pause before another attempt.",
    Reason.ENDING: "It is being ended: nothing of it starts any more.",
    Reason.FAIR_SHARE: "Shows that use less of their size come first.",
    Reason.BEHIND: "Frames of a higher priority, or that came before, go first.",
    Reason.QUEUED: "Nothing holds it back: it starts when a server next looks, within moments.",
    Reason.BOOKS_UNAVAILABLE: "The books of its show cannot be written now: Redis is away or being seeded.",
    Reason.BUS_UNAVAILABLE: "NATS is away, so nothing can be handed to a worker.",
    Reason.NO_SERVER: "No server is up, so nothing is started.",
    Reason.SAFETY_DENIED: "The policy does not let it run.",
    Reason.APPROVAL_REJECTED: "Somebody who may approve it refused to.",
    Reason.APPROVAL_EXPIRED: "Not enough people approved it in time.",
    Reason.APPROVAL_STALE: "What is stored is not what was asked to be approved.",
    Reason.MAX_RETRIES_EXCEEDED: "It failed, and its policy allows no further attempt.",
    Reason.DISPATCH_FAILED: "It could not be handed to a worker, as often as was tried.",
    Reason.MAX_WAIT_EXPIRED: "No frame of it was dispatched within its max_wait.",
    Reason.DEADLINE_EXPIRED: "Its deadline has passed.",
    Reason.DISPATCH_TIMEOUT: "Its worker never said that it started.",
    Reason.RUNNING_TIMEOUT: "It ran for longer than it may.",
    Reason.WORKER_LOST: "Its worker fell silent.",
    Reason.CANCELLED: "Somebody cancelled it.",
    Reason.OUTPUT_QUARANTINED: "The output policy keeps back what it returned.",
    Reason.OUTPUT_QUARANTINED_ASYNC: "The output policy keeps back what it returned, since a scan of its content.",
}

TIERS: Final[dict[Reason, Tier]] = {
    Reason.NO_POOL_MAPPING: Tier.MISCONFIGURED,
    Reason.UNKNOWN_TASK: Tier.MISCONFIGURED,
    Reason.POLICY_PENDING: Tier.BLOCKED,
    Reason.POLICY_UNAVAILABLE: Tier.BLOCKED,
    Reason.POLICY_THROTTLED: Tier.BLOCKED,
    Reason.WAITING_ON_JOB: Tier.BLOCKED,
    Reason.APPROVAL_REQUIRED: Tier.BLOCKED,
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
    Reason.NO_POOL_MAPPING: "`rota pool map TOPIC POOL` maps one that provides what it requires.",
    Reason.UNKNOWN_TASK: "Start a worker that knows TASK with `rota worker APP`, or submit it under its right name.",
    Reason.NO_WORKERS: "`rota worker --pool POOL` starts one; `rota workers` tells who is up and what they have.",
    Reason.POOL_OVERLOADED: "It starts when frames there end; `rota worker --pool POOL` on another machine adds room.",
    Reason.TENANT_LIMIT: "`rota show set SHOW --max-jobs N` raises that; a job that ends makes room.",
    Reason.QUOTA_SUBSCRIPTION: "`rota sub set SHOW POOL --BURST N` raises that; frames that end make room.",
    Reason.QUOTA_FOLDER: "`rota folder set SHOW FOLDER --max-WHAT N` raises that; frames that end make room.",
    Reason.QUOTA_JOB: "`rota job set SHOW JOB --max-WHAT N` raises that; frames that end make room.",
    Reason.QUOTA_LAYER: "`rota layer set SHOW LAYER --max-WHAT N` raises that; frames that end make room.",
    Reason.QUOTA_POINT: "`rota dept set SHOW DEPT --max-WHAT N` raises that; frames that end make room.",
    Reason.POLICY_PENDING: "Wait a moment; if it stays so, look whether a server is up with `rota status`.",
    Reason.POLICY_UNAVAILABLE: "Start the safety kernel again; the job is asked about again by itself.",
    Reason.POLICY_THROTTLED: "Wait: it is asked about again by itself, when its rule says.",
    Reason.WAITING_ON_JOB: "`rota explain JOB` tells why that one has not ended.",
    Reason.JOB_BEFORE_FAILED: "`rota explain JOB` tells what became of that one; mend it, and submit both again.",
    Reason.FRAME_FAILED: "`rota job show JOB` names the frame and its error: mend that, and submit it again.",
    Reason.APPROVAL_REQUIRED: "`rota approvals approve JOB` by somebody who may, and did not submit it.",
    Reason.WAITING_ON_RUN: "`rota explain RUN` tells what that one waits for.",
    Reason.RUN_PAUSED: "`rota workflow resume RUN` lets steps begin again.",
    Reason.COMPENSATING: "Wait; once it has ended, `rota workflow rollback RUN` tries again what was not undone.",
    Reason.NEWS_WAITING: "Nothing is to be done; if it stays so, look whether a server is up with `rota status`.",
    Reason.PAUSED: "`rota queue resume QUEUE` opens it.",
    Reason.DEFERRED: "Wait for that time, or cancel it with `rota job cancel JOB` and submit it without a delay.",
    Reason.ENDING: "Wait until its frames have stopped; `rota job wait JOB` tells when.",
    Reason.FAIR_SHARE: "A greater `rota sub set SHOW POOL --size N` brings its turn forward.",
    Reason.BEHIND: "A higher --priority brings a job's turn forward when it is submitted; waiting does, too.",
    Reason.QUEUED: "Nothing is to be done.",
    Reason.BOOKS_UNAVAILABLE: "Bring Redis back: the books are seeded by themselves. `rota ledger audit` checks them.",
    Reason.BUS_UNAVAILABLE: "Bring NATS back; servers connect again by themselves.",
    Reason.NO_SERVER: "Start `rota up` or `rota server`.",
    Reason.SAFETY_DENIED: "Change the job or the policy, then submit it again; `rota explain JOB` names the rule.",
    Reason.APPROVAL_REJECTED: "Ask whoever refused, change the job, and submit it again.",
    Reason.APPROVAL_EXPIRED: "Submit it again, and have it approved in time.",
    Reason.APPROVAL_STALE: "Somebody changed it where it is stored: look into that, and submit it again.",
    Reason.MAX_RETRIES_EXCEEDED: "Mend what made it fail, then take it up again with `rota dlq retry`.",
    Reason.DISPATCH_FAILED: "Look at the servers' log and at NATS; `rota dlq retry` takes it up again.",
    Reason.MAX_WAIT_EXPIRED: "Submit it again with a longer --max-wait, or see what kept it with `rota explain`.",
    Reason.DEADLINE_EXPIRED: "Submit it again with a later --deadline.",
    Reason.DISPATCH_TIMEOUT: "Look at the worker's log; the frame is tried again as often as it may be.",
    Reason.RUNNING_TIMEOUT: "Give it more time with --timeout, or make it faster.",
    Reason.WORKER_LOST: "Look at that machine; the frame is tried again as often as it may be.",
    Reason.CANCELLED: "Submit it again if that was a mistake.",
    Reason.OUTPUT_QUARANTINED: "`rota outputs release OUTPUT` or `rota outputs redact OUTPUT` lets it out.",
    Reason.OUTPUT_QUARANTINED_ASYNC: "`rota outputs release OUTPUT` or `rota outputs redact OUTPUT` lets it out.",
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
