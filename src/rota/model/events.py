"""Events published by servers: encoding, filters and kinds. No I/O.

Events that differ only in their job or run are sent as one `EventGroup`, because thousands of jobs end together; an
`EventMessage` of the stream contains many groups. The id of an event is its position: stream, message, index within the
message.

| kind | when | facts |
|---|---|---|
| `job.<state>` | a job entered that state | `topic` |
| `job.retried` | frames of it were resubmitted | `as`: the new job |
| `worker.came` | a worker registered | `worker`, `name`, `pool` |
| `worker.draining`, `.gone`, `.lost` | it accepts no more frames, shut down, stopped its heartbeats | the same |
| `server.came`, `.gone`, `.lost` | a server started, shut down, disappeared | `name` |
| `dlq.added` | a dead letter was recorded | `what`, `reason` |
| `agent.started` | a run that is not short is in progress | `agent`, `run`, `replica` |
| `agent.<outcome>` | a run ended this way, or its replica is gone | `agent`, `run`, `took_ms`, `failure` |
| `agent.quarantined` | a run that was stopped keeps running | `agent`, `run`, `replica` |
| `run.began`, `.ending`, `.paused`, `.resumed`, `.compensating` | a workflow run changed accordingly | `workflow` |
| `run.ended.<state>` | it ended in that state | `workflow` |
| `run.step.<what>` | a step began, or entered that state | `workflow`, `step`; its job or approval as `job` |
| `run.notify` | a notify step ran | `workflow`, `step`, `text` |
| `saga.undoing`, `.undone`, `.failed`, `.skipped`, `.corrupt` | compensation of one job | `saga`, `step` |
| `saga.ended.<state>` | nothing is left to compensate | `saga` |
| `approval.requested` | an approval is requested | `approval`, `of`: a job or a step, `rule` |
| `approval.vote`, `.granted`, `.rejected`, `.expired` | a vote, or the outcome of an approval | `what`; `audit` |
| `show.*`, `folder.*`, `pool.*` and the like (`AUDITED_FAMILIES`) | a change by a user | `what`; `audit`: its entry |
| `reset` | events are missing: the client must reload | `because` |

PostgreSQL is the record; events are notifications. They contain no payload, error text or secret, except the `text` of
a notify step, which is meant to be published.
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
"""Families of changes made by users; the audit log defines the kinds."""
EVENT_FAMILIES: Final = ("job", "worker", "server", "dlq", "run", "saga", *AUDITED_FAMILIES)

EventFact = str | int | float | bool | None

_POSITION = re.compile(r"([0-9a-f]{1,32})-([0-9]{1,19})(?:-([0-9]{1,9}))?", re.ASCII)
_KIND = re.compile(r"[a-z]+(?:\.[a-z_]+)?", re.ASCII)
KINDS_MAX: Final = 32


class EventGroup(msgspec.Struct, frozen=True, array_like=True):
    """Events of one kind and time, one for each of `jobs` or `runs`; without either, a single event."""

    kind: str
    at_ms: int
    show: UUID | None = None
    """None: not about a show."""
    show_name: str | None = None
    jobs: bytes = b""
    """Concatenated ids."""
    facts: dict[str, EventFact] = {}
    runs: bytes = b""
    """Concatenated ids of workflow runs; together with `jobs`, the same number of each."""

    @property
    def count(self) -> int:
        return len(self.jobs or self.runs) // ID_BYTES or 1

    def job(self, index: int) -> JobId | None:
        found = _id_at(self.jobs, index)
        return JobId(found) if found is not None else None

    def run(self, index: int) -> RunId | None:
        found = _id_at(self.runs, index)
        return RunId(found) if found is not None else None

    def indexes_of_job(self, job: UUID) -> list[int]:
        """Indexes of the events about `job`."""
        return _indexes_of(self.jobs, job)

    def indexes_of_run(self, run: UUID) -> list[int]:
        return _indexes_of(self.runs, run)


class EventMessage(msgspec.Struct, frozen=True, array_like=True):
    """One message of the stream."""

    groups: list[EventGroup]
    audited: int = 0
    """The last audit entry that is published here."""
    server: str = ""
    """The server whose start or end is published here."""


class StreamPosition(msgspec.Struct, frozen=True):
    """Read position: message `seq` of the stream created at `mark`, up to its event `index`."""

    mark: str
    seq: int
    index: int | None = None
    """None: the whole message."""

    def __str__(self) -> str:
        return f"{self.mark}-{self.seq}" if self.index is None else f"{self.mark}-{self.seq}-{self.index}"

    @classmethod
    def parse(cls, text: str) -> Self:
        found = _POSITION.fullmatch(text)
        if found is None:
            shown = repr(text if len(text) <= 40 else f"{text[:37]}...")
            raise InvalidInput(
                f"{shown} is not a valid event id: use the id of a received event, or none to start now."
            )
        mark, seq, index = found.groups()
        return cls(mark, int(seq), None if index is None else int(index))


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One event as clients see it."""

    id: str
    """Position in the stream; a client resumes after it."""
    at: datetime
    kind: str
    show: str | None
    job: JobId | None
    run: RunId | None = None
    """Workflow run."""
    facts: dict[str, EventFact] = {}


class EventBatch(msgspec.Struct, frozen=True, eq=False):
    """Events of a group for one subscriber: all from `first` on, or only the indexes `only`."""

    place: StreamPosition
    """Position of the group's first event."""
    group: EventGroup
    first: int = 0
    only: tuple[int, ...] | None = None

    @property
    def indexes(self) -> Sequence[int]:
        """Indexes of the events within the group."""
        return range(self.first, self.group.count) if self.only is None else self.only

    def events(self) -> list[Event]:
        return [self.event(index) for index in self.indexes]

    def event(self, index: int) -> Event:
        group, begin = self.group, self.place.index
        return Event(
            id=str(self.place if begin is None else StreamPosition(self.place.mark, self.place.seq, begin + index)),
            at=datetime.fromtimestamp(group.at_ms / 1000, UTC),
            kind=group.kind,
            show=group.show_name or (str(group.show) if group.show else None),
            job=group.job(index),
            run=group.run(index),
            facts=group.facts,
        )

    def after(self, index: int) -> EventBatch | None:
        """The events after event `index` of the message; None if there are none."""
        first = max(self.first, index + 1 - (self.place.index or 0))
        return msgspec.structs.replace(self, first=first) if first < self.group.count else None


class EventFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which events a subscriber may see and has requested."""

    shows: frozenset[ShowId] | None = None
    """Shows it may see; None: all, including events without a show."""
    show: str | None = None
    job: JobId | None = None
    run: RunId | None = None
    kinds: tuple[str, ...] = ()
    """Kinds, or families such as `job`; empty: all."""

    def apply(self, batch: EventBatch) -> EventBatch | None:
        group = batch.group
        if group.kind == RESET_KIND:
            return batch
        if self.shows is not None and group.show not in self.shows:
            return None
        if self.show is not None and group.show_name != self.show:
            return None
        if self.kinds and not any(group.kind == kind or group.kind.startswith(f"{kind}.") for kind in self.kinds):
            return None
        if self.job is None and self.run is None:
            return batch
        indexes = set(range(batch.first, group.count))
        if self.job is not None:
            indexes &= set(group.indexes_of_job(self.job))
        if self.run is not None:
            indexes &= set(group.indexes_of_run(self.run))
        return msgspec.structs.replace(batch, only=tuple(sorted(indexes))) if indexes else None


def _id_at(ids: bytes, index: int) -> UUID | None:
    found = ids[index * ID_BYTES : (index + 1) * ID_BYTES]
    return UUID(bytes=found) if found else None


def _indexes_of(ids: bytes, id_: UUID) -> list[int]:
    needle, found, at = id_.bytes, [], -1
    while (at := ids.find(needle, at + 1)) >= 0:
        if at % ID_BYTES == 0:
            found.append(at // ID_BYTES)
    return found


def join_ids(ids: Iterable[UUID]) -> bytes:
    """Ids in the concatenated form of `EventGroup`."""
    return b"".join([id_.bytes for id_ in ids])


def to_event_batches(mark: str, seq: int, groups: Sequence[EventGroup]) -> list[EventBatch]:
    """The groups of message `seq`, each with its position."""
    found, index = [], 0
    for group in groups:
        found.append(EventBatch(StreamPosition(mark, seq, index), group))
        index += group.count
    return found


def parse_event_kinds(texts: Iterable[str]) -> tuple[str, ...]:
    """Kinds and families from user input, comma-separated or repeated."""
    kinds = tuple(dict.fromkeys(word.strip() for text in texts for word in text.split(",") if word.strip()))
    if len(kinds) > KINDS_MAX:
        raise InvalidInput(f"{len(kinds)} kinds of events are too many: use at most {KINDS_MAX}.")
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
    hint = (
        f"did you mean {near[0]}?" if near else f"use one of {', '.join(EVENT_FAMILIES)}, or a kind such as job.failed."
    )
    raise InvalidInput(f"{kind[:40]!r} is not a known kind of event: {hint}", nearest=near[0] if near else None)
