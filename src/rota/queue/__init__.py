"""The queue: stores waiting, claimed, deferred, failed and dead frames in PostgreSQL, and counts them exactly.

Submission enqueues, the dispatcher claims, the completion path ends attempts. docs/adr/0013-the-queue.md describes the
storage and gives the reasons.

Terms: a *lane* is one FIFO of a queue, priority and shard, in which jobs take turns. A *position* (lane, seq) is one
attempt of one frame. An *entry* is a row for one or more consecutive positions. A *claim* hands up to 512 consecutive
positions to one dispatcher; its *tokens* name them. A *closure* records how positions of a claim ended. A *slot* holds
entries, claims and closures of one period; seven form a ring. A *delta* is the change of counts by one batch.

Invariants and what enforces them:
- a position is claimed by one owner at a time, and ends once: `rota.queue_claim_each`, under the lock of the lane, and
  the lock of the claim; a token is never reused, so a late report of an earlier claim is refused;
- counts equal the rows: every function writes rows and deltas in one transaction;
- claims of a dead dispatcher return to the queue: `maintenance`, after accounting has tombstoned their tokens.

| module | responsibility |
|---|---|
| `queue` | enqueue, claim, end, cancel, count |
| `entries`, `claims`, `tokens`, `counts` | values; no I/O |
| `failed`, `dead_letters` | frames that failed for good; dead letters of all kinds |
| `storage` | single maintenance steps: promote, fold, rotate, prune, carry over |
| `maintenance` | runs these steps on one leader |
| `storage_report`, `metrics` | read-only views of the storage |
| `bridge` | enqueue inside a transaction of another driver |
"""

from rota.queue.bridge import enqueue_on, enqueue_on_sync
from rota.queue.claims import Claim, ClaimedRange, ClaimRequest, ClaimResult
from rota.queue.counts import ClaimableLane, CounterMode, QueueCounts
from rota.queue.dead_letters import DeadLetterFilter, DeadLetterQueue
from rota.queue.entries import BATCH, CRITICAL, INTERACTIVE, LanePosition, QueueEntry
from rota.queue.failed import FailedFilter, FailedFrame, FailedFrames
from rota.queue.maintenance import MaintenanceIntervals, QueueMaintenance
from rota.queue.queue import CHANNEL, CLAIMS_MAX, LANES_MAX, FrameFailure, Queue, QueueInfo
from rota.queue.tokens import CLAIM_MAX, EndResult

__all__ = [
    "BATCH",
    "CHANNEL",
    "CLAIMS_MAX",
    "CLAIM_MAX",
    "CRITICAL",
    "INTERACTIVE",
    "LANES_MAX",
    "Claim",
    "ClaimRequest",
    "ClaimResult",
    "ClaimableLane",
    "ClaimedRange",
    "CounterMode",
    "DeadLetterFilter",
    "DeadLetterQueue",
    "EndResult",
    "FailedFilter",
    "FailedFrame",
    "FailedFrames",
    "FrameFailure",
    "LanePosition",
    "MaintenanceIntervals",
    "Queue",
    "QueueCounts",
    "QueueEntry",
    "QueueInfo",
    "QueueMaintenance",
    "enqueue_on",
    "enqueue_on_sync",
]
