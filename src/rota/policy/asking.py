"""What the policy is asked about jobs: of a plan that is about to be written, and of a job that is stored, the same.

Both come down to the columns of a job (`Seen`), and one function reads them. Jobs that are alike in all that rules look
at become one question; those that share a plan are not even looked at one by one. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from rota.model.ids import JobId
from rota.model.job import ActorType, Budget
from rota.model.job_plan import Plan
from rota.model.policy import Asked, Question, Word
from rota.model.work import Work

REMEMBERED: Final = 1024
REMEMBERED_BYTES: Final = 4096
"""Longer descriptions of work are read anew each time."""

T = TypeVar("T")

_ENCODE = msgspec.msgpack.Encoder(order="deterministic").encode
_WORK = msgspec.msgpack.Decoder(Work).decode


class SeenLayer(NamedTuple):
    work: bytes
    requires: tuple[str, ...]
    """Those of its job included."""
    frames: int
    input_bytes: int
    """Items included."""


class Seen(NamedTuple):
    """A job in its columns."""

    show: str
    folder: str
    dept: str
    topic: str
    priority: int
    labels: str | None
    """As JSON."""
    details: bytes | None
    workflow_id: str | None
    layers: tuple[SeenLayer, ...]


class Grouped(NamedTuple):
    questions: list[Question]
    jobs: Sequence[JobId]
    places: list[int]
    """Of each job: which question is about it."""

    def each(self, words: Sequence[Word], decided: Callable[[Word], T]) -> list[T]:
        """What the words come to for each job; looked at once for all that a word is the same for."""
        plain = [decided(replace(word, apart=()) if word.apart else word) for word in words]
        if not any(word.apart for word in words):
            return [plain[place] for place in self.places]
        apart = {
            job: told for word in words for each in word.apart for told in [decided(each.word)] for job in each.jobs
        }
        return [apart.get(job, plain[place]) for job, place in zip(self.jobs, self.places, strict=True)]


class _Details(msgspec.Struct, frozen=True):
    """As much of `rota.model.job.Details` as rules see."""

    budget: Budget | None = None
    requires: tuple[str, ...] = ()
    capability: str = ""
    risk_tags: tuple[str, ...] = ()
    actor_id: str = ""
    actor_type: ActorType = ""
    tenant: str = ""
    principal: str = ""
    adapter_id: str = ""
    pack_id: str = ""


class _Worked(NamedTuple):
    task: str
    env_names: tuple[str, ...]
    cores: int
    gpus: int


_DETAILS = msgspec.msgpack.Decoder(_Details).decode
_LABELS = msgspec.json.Decoder(dict[str, str]).decode
_NOTHING: Final = _Details()


def asked_of(seen: Seen) -> Asked:
    details = _DETAILS(seen.details) if seen.details is not None else _NOTHING
    works = [_worked(layer.work) for layer in seen.layers]
    return Asked(
        show=seen.show,
        topic=seen.topic,
        priority=seen.priority,
        folder=seen.folder,
        dept=seen.dept,
        capability=details.capability,
        risk_tags=details.risk_tags,
        requires=_union(layer.requires for layer in seen.layers),
        labels=_LABELS(seen.labels) if seen.labels else {},
        actor_id=details.actor_id,
        actor_type=details.actor_type,
        tenant=details.tenant,
        principal=details.principal,
        pack_id=details.pack_id,
        adapter_id=details.adapter_id,
        workflow_id=seen.workflow_id or "",
        tasks=tuple(dict.fromkeys(work.task for work in works)),
        env_names=_union(work.env_names for work in works),
        frames=sum(layer.frames for layer in seen.layers),
        cores=max(work.cores for work in works) / 100,
        gpus=max(work.gpus for work in works),
        input_bytes=sum(layer.input_bytes for layer in seen.layers),
        deadline_ms=details.budget.deadline_ms if details.budget is not None else 0,
    )


def seen_of(plan: Plan) -> Seen:
    return Seen(
        plan.show,
        plan.folder,
        plan.dept,
        plan.topic,
        plan.priority,
        plan.labels,
        plan.details,
        plan.workflow_id,
        tuple(
            SeenLayer(
                layer.work,
                layer.place.requires,
                layer.frames.count,
                len(layer.input or b"") + sum(map(len, layer.items)),
            )
            for layer in plan.layers
        ),
    )


class Asking:
    """Makes questions, and remembers what plans that stand for many were read as."""

    def __init__(self) -> None:
        self._shared: dict[int, tuple[Plan, Asked]] = {}
        """By the id of the plan, which is kept so that no other has it."""

    def about_plans(self, jobs: Sequence[JobId], plans: Sequence[Plan]) -> Grouped:
        collected = _Collected()
        alike: dict[tuple[int, int, str | None], int] = {}
        places = []
        for plan in plans:
            if plan.like is None:
                places.append(collected.place(seen_of(plan)))
                continue
            size = len(plan.layers[0].input or b"")
            kind = id(plan.like), size, plan.workflow_id
            place = alike.get(kind)
            if place is None:
                asked = replace(self._base(plan.like), input_bytes=size, workflow_id=plan.workflow_id or "")
                place = alike[kind] = collected.add(asked)
            places.append(place)
        return collected.grouped(jobs, places)

    def _base(self, plan: Plan) -> Asked:
        known = self._shared.get(id(plan))
        if known is None:
            if len(self._shared) >= REMEMBERED:
                self._shared.clear()
            known = self._shared[id(plan)] = plan, asked_of(seen_of(plan))
        return known[1]


def about(jobs: Sequence[JobId], seen: Sequence[Seen]) -> Grouped:
    """Of jobs that are stored."""
    collected = _Collected()
    return collected.grouped(jobs, [collected.place(each) for each in seen])


class _Collected:
    """Distinct questions, in the order in which they came up."""

    def __init__(self) -> None:
        self._asked: list[Asked] = []
        self._by_bytes: dict[bytes, int] = {}
        self._by_columns: dict[Seen, int] = {}

    def place(self, seen: Seen) -> int:
        place = self._by_columns.get(seen)
        if place is None:
            place = self._by_columns[seen] = self.add(asked_of(seen))
        return place

    def add(self, asked: Asked) -> int:
        place = self._by_bytes.setdefault(_ENCODE(asked), len(self._asked))
        if place == len(self._asked):
            self._asked.append(asked)
        return place

    def grouped(self, jobs: Sequence[JobId], places: list[int]) -> Grouped:
        of: list[list[JobId]] = [[] for _ in self._asked]
        for job, place in zip(jobs, places, strict=True):
            of[place].append(job)
        questions = [Question(asked, tuple(each)) for asked, each in zip(self._asked, of, strict=True)]
        return Grouped(questions, jobs, places)


def _worked(work: bytes) -> _Worked:
    return _remembered(work) if len(work) <= REMEMBERED_BYTES else _read(work)


def _read(work: bytes) -> _Worked:
    read = _WORK(work)
    return _Worked(read.task or read.argv[0], tuple(sorted(read.env)), read.cores, read.gpus)


_remembered = lru_cache(maxsize=REMEMBERED)(_read)


def _union(many: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(sorted({each for some in many for each in some}))
