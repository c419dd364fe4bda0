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
from rota.model.jobs.submission import ActorType, Budget
from rota.model.jobs.validation import ValidatedSubmission
from rota.model.jobs.work import Work
from rota.model.policy.decision import PolicyDecision, PolicyRequest, PolicyRequestGroup

CACHE_MAX: Final = 1024
CACHED_BYTES_MAX: Final = 4096
"""Longer descriptions of work are read anew each time."""

T = TypeVar("T")

_ENCODE = msgspec.msgpack.Encoder(order="deterministic").encode
_WORK = msgspec.msgpack.Decoder(Work).decode


class PolicyInputLayer(NamedTuple):
    work: bytes
    requires: tuple[str, ...]
    """Those of its job included."""
    frames: int
    input_bytes: int
    """Items included."""


class PolicyInput(NamedTuple):
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
    layers: tuple[PolicyInputLayer, ...]


class GroupedQuestions(NamedTuple):
    questions: list[PolicyRequestGroup]
    jobs: Sequence[JobId]
    places: list[int]
    """Of each job: which question is about it."""

    def map_jobs(self, words: Sequence[PolicyDecision], decided: Callable[[PolicyDecision], T]) -> list[T]:
        """What the words come to for each job; looked at once for all that a word is the same for."""
        plain = [decided(replace(word, apart=()) if word.apart else word) for word in words]
        if not any(word.apart for word in words):
            return [plain[place] for place in self.places]
        apart = {
            job: told for word in words for each in word.apart for told in [decided(each.word)] for job in each.jobs
        }
        return [apart.get(job, plain[place]) for job, place in zip(self.jobs, self.places, strict=True)]


class _PolicyDetails(msgspec.Struct, frozen=True):
    """As much of `rota.model.jobs.submission.SubmissionDetails` as rules see."""

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


class _WorkSummary(NamedTuple):
    task: str
    env_names: tuple[str, ...]
    cores: int
    gpus: int


_DETAILS = msgspec.msgpack.Decoder(_PolicyDetails).decode
_LABELS = msgspec.json.Decoder(dict[str, str]).decode
_NO_DETAILS: Final = _PolicyDetails()


def request_of_input(seen: PolicyInput) -> PolicyRequest:
    details = _DETAILS(seen.details) if seen.details is not None else _NO_DETAILS
    works = [_summarize_work(layer.work) for layer in seen.layers]
    return PolicyRequest(
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


def input_of_submission(plan: ValidatedSubmission) -> PolicyInput:
    return PolicyInput(
        plan.show,
        plan.folder,
        plan.dept,
        plan.topic,
        plan.priority,
        plan.labels,
        plan.details,
        plan.workflow_id,
        tuple(
            PolicyInputLayer(
                layer.work,
                layer.place.requires,
                layer.frames.count,
                len(layer.input or b"") + sum(map(len, layer.items)),
            )
            for layer in plan.layers
        ),
    )


class PolicyRequestBuilder:
    """Makes questions, and remembers what plans that stand for many were read as."""

    def __init__(self) -> None:
        self._shared: dict[int, tuple[ValidatedSubmission, PolicyRequest]] = {}
        """By the id of the plan, which is kept so that no other has it."""

    def group_submissions(self, jobs: Sequence[JobId], plans: Sequence[ValidatedSubmission]) -> GroupedQuestions:
        collected = _DistinctRequests()
        alike: dict[tuple[int, int, str | None], int] = {}
        places = []
        for plan in plans:
            if plan.like is None:
                places.append(collected.index_of(input_of_submission(plan)))
                continue
            size = len(plan.layers[0].input or b"")
            kind = id(plan.like), size, plan.workflow_id
            place = alike.get(kind)
            if place is None:
                asked = replace(self._shared_request(plan.like), input_bytes=size, workflow_id=plan.workflow_id or "")
                place = alike[kind] = collected.add(asked)
            places.append(place)
        return collected.group_jobs(jobs, places)

    def _shared_request(self, plan: ValidatedSubmission) -> PolicyRequest:
        known = self._shared.get(id(plan))
        if known is None:
            if len(self._shared) >= CACHE_MAX:
                self._shared.clear()
            known = self._shared[id(plan)] = plan, request_of_input(input_of_submission(plan))
        return known[1]


def group_stored_jobs(jobs: Sequence[JobId], seen: Sequence[PolicyInput]) -> GroupedQuestions:
    """Of jobs that are stored."""
    collected = _DistinctRequests()
    return collected.group_jobs(jobs, [collected.index_of(each) for each in seen])


class _DistinctRequests:
    """Distinct questions, in the order in which they came up."""

    def __init__(self) -> None:
        self._asked: list[PolicyRequest] = []
        self._by_bytes: dict[bytes, int] = {}
        self._by_columns: dict[PolicyInput, int] = {}

    def index_of(self, seen: PolicyInput) -> int:
        place = self._by_columns.get(seen)
        if place is None:
            place = self._by_columns[seen] = self.add(request_of_input(seen))
        return place

    def add(self, asked: PolicyRequest) -> int:
        place = self._by_bytes.setdefault(_ENCODE(asked), len(self._asked))
        if place == len(self._asked):
            self._asked.append(asked)
        return place

    def group_jobs(self, jobs: Sequence[JobId], places: list[int]) -> GroupedQuestions:
        of: list[list[JobId]] = [[] for _ in self._asked]
        for job, place in zip(jobs, places, strict=True):
            of[place].append(job)
        questions = [PolicyRequestGroup(asked, tuple(each)) for asked, each in zip(self._asked, of, strict=True)]
        return GroupedQuestions(questions, jobs, places)


def _summarize_work(work: bytes) -> _WorkSummary:
    return _parse_work_cached(work) if len(work) <= CACHED_BYTES_MAX else _parse_work(work)


def _parse_work(work: bytes) -> _WorkSummary:
    read = _WORK(work)
    return _WorkSummary(read.task or read.argv[0], tuple(sorted(read.env)), read.cores, read.gpus)


_parse_work_cached = lru_cache(maxsize=CACHE_MAX)(_parse_work)


def _union(many: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(sorted({each for some in many for each in some}))
