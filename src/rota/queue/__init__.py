"""The queue: where frames wait and end, counted exactly. docs/adr/0013-the-queue.md says how and why."""

from rota.queue.bridge import enqueue_on, enqueue_on_sync
from rota.queue.claims import Claim, Piece
from rota.queue.counts import Candidate, CounterMode, Counts
from rota.queue.dead_letters import DeadLetter, DeadLetterFilter, DeadLetters
from rota.queue.entries import BATCH, CRITICAL, INTERACTIVE, Entry, Placed
from rota.queue.failed import FailedFilter, FailedFrame, FailedFrames
from rota.queue.room import CHANNEL, Failure, Queue, QueueInfo
from rota.queue.tokens import CLAIM_MAX, Ended
from rota.queue.upkeep import Pace, Upkeep

__all__ = [
    "BATCH",
    "CHANNEL",
    "CLAIM_MAX",
    "CRITICAL",
    "INTERACTIVE",
    "Candidate",
    "Claim",
    "CounterMode",
    "Counts",
    "DeadLetter",
    "DeadLetterFilter",
    "DeadLetters",
    "Ended",
    "Entry",
    "FailedFilter",
    "FailedFrame",
    "FailedFrames",
    "Failure",
    "Pace",
    "Piece",
    "Placed",
    "Queue",
    "QueueInfo",
    "Upkeep",
    "enqueue_on",
    "enqueue_on_sync",
]
