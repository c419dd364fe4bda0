"""The queue: where frames wait and end, counted exactly. docs/adr/0013-the-queue.md says how and why."""

from rota.queue.bridge import enqueue_on, enqueue_on_sync
from rota.queue.claims import Claim, ClaimedRange
from rota.queue.counts import ClaimableLane, CounterMode, QueueCounts
from rota.queue.dead_letters import DeadLetter, DeadLetterFilter, DeadLetterQueue
from rota.queue.entries import BATCH, CRITICAL, INTERACTIVE, LanePosition, QueueEntry
from rota.queue.failed import FailedFilter, FailedFrame, FailedFrames
from rota.queue.maintenance import MaintenanceIntervals, QueueMaintenance
from rota.queue.queue import CHANNEL, FrameFailure, Queue, QueueInfo
from rota.queue.tokens import CLAIM_MAX, EndResult

__all__ = [
    "BATCH",
    "CHANNEL",
    "CLAIM_MAX",
    "CRITICAL",
    "INTERACTIVE",
    "Claim",
    "ClaimableLane",
    "ClaimedRange",
    "CounterMode",
    "DeadLetter",
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
