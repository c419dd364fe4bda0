"""Builds policy requests, the same from a validated submission and from a stored job.

Both are reduced to the columns of a job (`PolicyInput`), which one function reads. Jobs that are identical in
everything that rules see become one request; jobs that share a template are not even inspected one by one. No I/O.
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
"""Longer work descriptions are not cached."""

T = TypeVar("T")

_ENCODE = msgspec.msgpack.Encoder(order="deterministic").encode
_WORK = msgspec.msgpack.Decoder(Work).decode


class PolicyInputLayer(NamedTuple):
    work: bytes
    requires: tuple[str, ...]
    """Including those of its job."""
    frames: int
    input_bytes: int
    """Including items."""


class PolicyInput(NamedTuple):
    """The columns of a job that rules see."""

    show: str
    folder: str
    dept: str
    topic: str
    priority: int
    labels: str | None
    """JSON."""
    details: bytes | None
    workflow_id: str | None
    layers: tuple[PolicyInputLayer, ...]


class GroupedQuestions(NamedTuple):
    questions: list[PolicyRequestGroup]
    jobs: Sequence[JobId]
    places: list[int]
    """For each job the index of its question."""

    def map_jobs(self, decisions: Sequence[PolicyDecision], decided: Callable[[PolicyDecision], T]) -> list[T]:
        """`decided` of each job's decision; called once per distinct decision."""
        plain = [decided(replace(decision, apart=()) if decision.apart else decision) for decision in decisions]
        if not any(decision.apart for decision in decisions):
            return [plain[index] for index in self.places]
        apart = {
            job: result
            for decision in decisions
            for each in decision.apart
            for result in [decided(each.word)]
            for job in each.jobs
        }
        return [apart.get(job, plain[index]) for job, index in zip(self.jobs, self.places, strict=True)]


class _PolicyDetails(msgspec.Struct, frozen=True):
    """The part of `rota.model.jobs.submission.SubmissionDetails` that rules see."""

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


def request_of_input(job: PolicyInput) -> PolicyRequest:
    details = _DETAILS(job.details) if job.details is not None else _NO_DETAILS
    works = [_summarize_work(layer.work) for layer in job.layers]
    return PolicyRequest(
        show=job.show,
        topic=job.topic,
        priority=job.priority,
        folder=job.folder,
        dept=job.dept,
        capability=details.capability,
        risk_tags=details.risk_tags,
        requires=_union(layer.requires for layer in job.layers),
        labels=_LABELS(job.labels) if job.labels else {},
        actor_id=details.actor_id,
        actor_type=details.actor_type,
        tenant=details.tenant,
        principal=details.principal,
        pack_id=details.pack_id,
        adapter_id=details.adapter_id,
        workflow_id=job.workflow_id or "",
        tasks=tuple(dict.fromkeys(work.task for work in works)),
        env_names=_union(work.env_names for work in works),
        frames=sum(layer.frames for layer in job.layers),
        cores=max(work.cores for work in works) / 100,
        gpus=max(work.gpus for work in works),
        input_bytes=sum(layer.input_bytes for layer in job.layers),
        deadline_ms=details.budget.deadline_ms if details.budget is not None else 0,
    )


def input_of_submission(submission: ValidatedSubmission) -> PolicyInput:
    return PolicyInput(
        submission.show,
        submission.folder,
        submission.dept,
        submission.topic,
        submission.priority,
        submission.labels,
        submission.details,
        submission.workflow_id,
        tuple(
            PolicyInputLayer(
                layer.work,
                layer.place.requires,
                layer.frames.count,
                len(layer.input or b"") + sum(map(len, layer.items)),
            )
            for layer in submission.layers
        ),
    )


class PolicyRequestBuilder:
    """Groups submissions into questions, and caches the requests of shared templates."""

    def __init__(self) -> None:
        self._shared: dict[int, tuple[ValidatedSubmission, PolicyRequest]] = {}
        """By id() of the template, which is kept alive so that no other object gets that id."""

    def group_submissions(self, jobs: Sequence[JobId], submissions: Sequence[ValidatedSubmission]) -> GroupedQuestions:
        distinct = _DistinctRequests()
        by_template: dict[tuple[int, int, str | None], int] = {}
        places = []
        for submission in submissions:
            if submission.like is None:
                places.append(distinct.index_of(input_of_submission(submission)))
                continue
            size = len(submission.layers[0].input or b"")
            kind = id(submission.like), size, submission.workflow_id
            index = by_template.get(kind)
            if index is None:
                request = replace(
                    self._shared_request(submission.like), input_bytes=size, workflow_id=submission.workflow_id or ""
                )
                index = by_template[kind] = distinct.add(request)
            places.append(index)
        return distinct.group_jobs(jobs, places)

    def _shared_request(self, submission: ValidatedSubmission) -> PolicyRequest:
        cached = self._shared.get(id(submission))
        if cached is None:
            if len(self._shared) >= CACHE_MAX:
                self._shared.clear()
            cached = self._shared[id(submission)] = submission, request_of_input(input_of_submission(submission))
        return cached[1]


def group_stored_jobs(jobs: Sequence[JobId], inputs: Sequence[PolicyInput]) -> GroupedQuestions:
    """Group stored jobs."""
    distinct = _DistinctRequests()
    return distinct.group_jobs(jobs, [distinct.index_of(each) for each in inputs])


class _DistinctRequests:
    """Distinct requests in order of first appearance."""

    def __init__(self) -> None:
        self._requests: list[PolicyRequest] = []
        self._by_bytes: dict[bytes, int] = {}
        self._by_columns: dict[PolicyInput, int] = {}

    def index_of(self, job: PolicyInput) -> int:
        index = self._by_columns.get(job)
        if index is None:
            index = self._by_columns[job] = self.add(request_of_input(job))
        return index

    def add(self, request: PolicyRequest) -> int:
        index = self._by_bytes.setdefault(_ENCODE(request), len(self._requests))
        if index == len(self._requests):
            self._requests.append(request)
        return index

    def group_jobs(self, jobs: Sequence[JobId], places: list[int]) -> GroupedQuestions:
        jobs_by_request: list[list[JobId]] = [[] for _ in self._requests]
        for job, index in zip(jobs, places, strict=True):
            jobs_by_request[index].append(job)
        questions = [
            PolicyRequestGroup(request, tuple(each))
            for request, each in zip(self._requests, jobs_by_request, strict=True)
        ]
        return GroupedQuestions(questions, jobs, places)


def _summarize_work(work: bytes) -> _WorkSummary:
    return _parse_work_cached(work) if len(work) <= CACHED_BYTES_MAX else _parse_work(work)


def _parse_work(work: bytes) -> _WorkSummary:
    decoded = _WORK(work)
    return _WorkSummary(decoded.task or decoded.argv[0], tuple(sorted(decoded.env)), decoded.cores, decoded.gpus)


_parse_work_cached = lru_cache(maxsize=CACHE_MAX)(_parse_work)


def _union(tuples: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(sorted({item for items in tuples for item in items}))
