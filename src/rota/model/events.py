"""What servers tell while it happens: how it travels, what faces show, and who wants what of it. No I/O.

Events that are alike but for their jobs travel as one `Group`, since thousands of jobs end together; a message of the
stream holds many groups (`Batch`). An event is named by its place: the stream, the message in it, the place in that
message.

| kind | when | facts |
|---|---|---|
| `job.<state>` | a job came into that state | `topic` |
| `job.retried` | frames of it were submitted again | `as`: the new job |
| `worker.came` | a worker was let in | `worker`, `name`, `pool` |
| `worker.draining`, `.gone`, `.lost` | it takes no more, has ended, fell silent | the same |
| `server.came`, `.gone`, `.lost` | a server started, has ended, went without a word | `name` |
| `dlq.added` | something was given up | `what`, `reason` |
| `agent.started` | a run that is no short one is under way | `agent`, `run`, `replica` |
| `agent.<outcome>` | a run has ended so, or its replica is gone | `agent`, `run`, `took_ms`, `failure` |
| `agent.quarantined` | a run that was stopped goes on | `agent`, `run`, `replica` |
| `run.began`, `.ending`, `.paused`, `.resumed`, `.compensating` | a run of a workflow did, or is | `workflow` |
| `run.ended.<state>` | it ended so | `workflow` |
| `run.step.<what>` | a step of it began, or came into that state | `workflow`, `step`; a job or approval as `job` |
| `run.notify` | a step tells something | `workflow`, `step`, `text` |
| `saga.undoing`, `.undone`, `.failed`, `.skipped`, `.corrupt` | a job is undone, or cannot be | `saga`, `step` |
| `saga.ended.<state>` | nothing is left to undo | `saga` |
| `approval.requested` | people are asked to agree | `approval`, `of`: a job or a step, `rule` |
| `approval.vote`, `.granted`, `.rejected`, `.expired` | one or enough agreed, or not | `what`; `audit` |
| `show.*`, `folder.*`, `pool.*` and the like (`CHANGED`) | somebody changed it | `what`; `audit`: its entry there |
| `reset` | some events are missing: look anew | `because` |

The record is PostgreSQL. Nothing here holds a payload, an error's text or a secret; a `text` is there to be told.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Final, Self
from uuid import UUID

import msgspec

from rota.model.agents import AgentOutcome
from rota.model.errors import InvalidInput
from rota.model.ids import JobId, RunId, ShowId
from rota.model.job_states import JobState
from rota.model.workflows.run_state import RunState, StepState

ID_BYTES: Final = 16
RESET_KIND: Final = "reset"
RETRIED_KIND: Final = "job.retried"
DEAD_LETTER_KIND: Final = "dlq.added"
JOB_KINDS: Final = (*(f"job.{state.lower()}" for state in JobState), RETRIED_KIND)
WORKER_KINDS: Final = ("worker.came", "worker.draining", "worker.gone", "worker.lost")
SERVER_KINDS: Final = ("server.came", "server.gone", "server.lost")
AGENT_KINDS: Final = ("agent.started", *(f"agent.{outcome.lower()}" for outcome in AgentOutcome), "agent.quarantined")
RUN_KINDS: Final = (
    *(f"run.{what}" for what in ("began", "ending", "paused", "resumed", "compensating", "notify")),
    *("run.ended", *(f"run.ended.{state.lower()}" for state in RunState if state.ended)),
    *("run.step", *(f"run.step.{what}" for what in ("began", "round", "stopping"))),
    *(f"run.step.{state.lower()}" for state in StepState if state.ended),
)
SAGA_KINDS: Final = (
    *(f"saga.{what}" for what in ("undoing", "undone", "failed", "skipped", "corrupt")),
    *("saga.ended", "saga.ended.rolled_back", "saga.ended.incomplete"),
)
AUDITED_FAMILIES: Final = (
    "show",
    "folder",
    "subscription",
    "point",
    "dept",
    "pool",
    "topic",
    "cap",
    "agent",
    "output",
    "approval",
    "workflow",
)
"""Families of what people change; what exactly is told by the audit trail."""
EVENT_FAMILIES: Final = ("job", "worker", "server", "dlq", "run", "saga", *AUDITED_FAMILIES)

EventFact = str | int | float | bool | None

_POSITION = re.compile(r"([0-9a-f]{1,32})-([0-9]{1,19})(?:-([0-9]{1,9}))?", re.ASCII)
_KIND = re.compile(r"[a-z]+(?:\.[a-z_]+)?", re.ASCII)
KINDS_MAX: Final = 32


class EventGroup(msgspec.Struct, frozen=True, array_like=True):
    """Events of one kind and moment, one for each of `jobs` or of `runs`; without any, one that concerns neither."""

    kind: str
    at_ms: int
    show: UUID | None = None
    """None: it concerns no show."""
    show_name: str | None = None
    jobs: bytes = b""
    """Their ids, one after the other."""
    facts: dict[str, EventFact] = {}
    runs: bytes = b""
    """Ids of runs of workflows; where there are jobs as well, as many of each."""

    @property
    def count(self) -> int:
        return len(self.jobs or self.runs) // ID_BYTES or 1

    def job(self, place: int) -> JobId | None:
        found = _id_at(self.jobs, place)
        return JobId(found) if found is not None else None

    def run(self, place: int) -> RunId | None:
        found = _id_at(self.runs, place)
        return RunId(found) if found is not None else None

    def indexes_of_job(self, job: UUID) -> list[int]:
        """Where a job is among its jobs."""
        return _indexes_of(self.jobs, job)

    def indexes_of_run(self, run: UUID) -> list[int]:
        return _indexes_of(self.runs, run)


class EventMessage(msgspec.Struct, frozen=True, array_like=True):
    """A message of the stream."""

    groups: list[EventGroup]
    audited: int = 0
    """The last entry of the audit trail that is told here."""
    server: str = ""
    """Which server speaks of itself here."""


class StreamPosition(msgspec.Struct, frozen=True):
    """Up to where somebody has read: message `seq` of the stream that was made at `mark`, up to its event `index`."""

    mark: str
    seq: int
    index: int | None = None
    """None: all of the message."""

    def __str__(self) -> str:
        return f"{self.mark}-{self.seq}" if self.index is None else f"{self.mark}-{self.seq}-{self.index}"

    @classmethod
    def parse(cls, text: str) -> Self:
        found = _POSITION.fullmatch(text)
        if found is None:
            shown = repr(text if len(text) <= 40 else f"{text[:37]}...")
            raise InvalidInput(f"{shown} is no id of an event: give one as it was told, or none to begin now.")
        mark, seq, index = found.groups()
        return cls(mark, int(seq), None if index is None else int(index))


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened."""

    id: str
    """Where it is in the stream: reading goes on after it."""
    at: datetime
    kind: str
    show: str | None
    job: JobId | None
    run: RunId | None = None
    """Of a workflow."""
    facts: dict[str, EventFact] = {}


class EventBatch(msgspec.Struct, frozen=True, eq=False):
    """Events of a group that go to a reader: those from `first` on, or only some of them."""

    place: StreamPosition
    """Of the group's first event."""
    group: EventGroup
    first: int = 0
    only: tuple[int, ...] | None = None

    @property
    def indexes(self) -> Sequence[int]:
        """Of its events in the group."""
        return range(self.first, self.group.count) if self.only is None else self.only

    def events(self) -> list[Event]:
        return [self.event(place) for place in self.indexes]

    def event(self, place: int) -> Event:
        group, begin = self.group, self.place.index
        return Event(
            id=str(self.place if begin is None else StreamPosition(self.place.mark, self.place.seq, begin + place)),
            at=datetime.fromtimestamp(group.at_ms / 1000, UTC),
            kind=group.kind,
            show=group.show_name or (str(group.show) if group.show else None),
            job=group.job(place),
            run=group.run(place),
            facts=group.facts,
        )

    def after(self, index: int) -> EventBatch | None:
        """What comes behind event `index` of the message."""
        first = max(self.first, index + 1 - (self.place.index or 0))
        return msgspec.structs.replace(self, first=first) if first < self.group.count else None


class EventFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which events somebody may see and asks for."""

    shows: frozenset[ShowId] | None = None
    """Those it may see; None: all, and what concerns none."""
    show: str | None = None
    job: JobId | None = None
    run: RunId | None = None
    kinds: tuple[str, ...] = ()
    """Kinds, or families of them such as `job`; without any, all."""

    def apply(self, portion: EventBatch) -> EventBatch | None:
        group = portion.group
        if group.kind == RESET_KIND:
            return portion
        if self.shows is not None and group.show not in self.shows:
            return None
        if self.show is not None and group.show_name != self.show:
            return None
        if self.kinds and not any(group.kind == kind or group.kind.startswith(f"{kind}.") for kind in self.kinds):
            return None
        if self.job is None and self.run is None:
            return portion
        found = set(range(portion.first, group.count))
        if self.job is not None:
            found &= set(group.indexes_of_job(self.job))
        if self.run is not None:
            found &= set(group.indexes_of_run(self.run))
        return msgspec.structs.replace(portion, only=tuple(sorted(found))) if found else None


def _id_at(ids: bytes, place: int) -> UUID | None:
    found = ids[place * ID_BYTES : (place + 1) * ID_BYTES]
    return UUID(bytes=found) if found else None


def _indexes_of(ids: bytes, one: UUID) -> list[int]:
    wanted, found, at = one.bytes, [], -1
    while (at := ids.find(wanted, at + 1)) >= 0:
        if at % ID_BYTES == 0:
            found.append(at // ID_BYTES)
    return found


def join_ids(jobs: Iterable[UUID]) -> bytes:
    """Ids as a group has them."""
    return b"".join([job.bytes for job in jobs])


def to_event_batches(mark: str, seq: int, groups: Sequence[EventGroup]) -> list[EventBatch]:
    """The groups of message `seq`, each at its place."""
    found, index = [], 0
    for group in groups:
        found.append(EventBatch(StreamPosition(mark, seq, index), group))
        index += group.count
    return found


def parse_event_kinds(asked: Iterable[str]) -> tuple[str, ...]:
    """Kinds and families as somebody asks for them, separated by commas or given one by one."""
    kinds = tuple(dict.fromkeys(word.strip() for text in asked for word in text.split(",") if word.strip()))
    if len(kinds) > KINDS_MAX:
        raise InvalidInput(f"{len(kinds)} kinds of events are too many: give {KINDS_MAX} at most.")
    for kind in kinds:
        _check_kind(kind)
    return kinds


def _check_kind(kind: str) -> None:
    family = kind.partition(".")[0]
    known = [
        *JOB_KINDS,
        *WORKER_KINDS,
        *SERVER_KINDS,
        *AGENT_KINDS,
        *RUN_KINDS,
        *SAGA_KINDS,
        DEAD_LETTER_KIND,
        *EVENT_FAMILIES,
    ]
    if kind in known or (family in AUDITED_FAMILIES and _KIND.fullmatch(kind)):
        return
    near = get_close_matches(kind, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(EVENT_FAMILIES)}, and such as job.failed."
    raise InvalidInput(f"There is no kind of event {kind[:40]!r}: {hint}", nearest=near[0] if near else None)
