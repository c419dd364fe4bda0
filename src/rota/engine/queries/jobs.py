"""Reads jobs: one with its layers, a page of many, the ends of frames, their artifacts."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

import msgspec

from rota.api.jobs import JobHistoryEntry, JobPage, JobSummary, JobView, Layer, PolicyDecisionView
from rota.infra.postgres import Database, Record, Transaction, query
from rota.model.artifacts import parse_artifact
from rota.model.errors import InvalidInput, NotFound
from rota.model.ids import JobId, LayerId, ShowId
from rota.model.job_states import TERMINAL_STATES, FrameState, JobState
from rota.model.jobs.frame_ranges import FrameSet
from rota.model.jobs.submission import decode_details
from rota.model.jobs.work import Work, work_view
from rota.model.policy.decision import PolicyDecision

GET = query(__package__, "jobs_get")
LIST = query(__package__, "jobs_list")
RUNNING = query(__package__, "jobs_running")
FRAME_ENDS = query(__package__, "jobs_ends")
ARTIFACTS = query(__package__, "jobs_artifacts")
ARTIFACTS_SUM = query(__package__, "jobs_artifacts_sum")
WITHHELD_OUTPUTS = query(__package__, "jobs_kept")
SHOW = query(__package__, "jobs_show")

PAGE_MAX: Final = 1_000
FIRST_SCAN_JOBS, SCAN_JOBS_MAX = 1_000, 20_000
"""Jobs scanned for a page of a filtered list: by the first statement, and by each further one."""
SCANS_MAX: Final = 4


class FrameEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How the last attempt of a frame ended. A frame that succeeded without a result has none."""

    frame: int
    attempt: int
    token: int
    state: FrameState
    value: bytes | None
    value_at: str | None
    code: str | None
    error: str | None
    took_ms: int
    worker: UUID | None
    artifacts: list[str] | None
    """Encoded by `rota.model.artifacts`."""
    output: str | None = None
    """held, quarantined: value and artifacts are withheld; redacted: they were changed."""
    finished_at: datetime


class FrameArtifact(msgspec.Struct, frozen=True):
    """An artifact of a frame."""

    frame: int
    """Its queue number."""
    attempt: int
    name: str
    pointer: str


class JobFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Selects the jobs of a list; all conditions must match."""

    show: str | None = None
    shows: frozenset[ShowId] | None = None
    """Shows that the caller may read; None: all."""
    state: JobState | None = None
    topic: str | None = None
    reason: str | None = None
    label: tuple[str, str] | None = None

    @property
    def is_unfiltered(self) -> bool:
        """Whether every job of its shows matches."""
        return not any((self.state, self.topic, self.reason, self.label))

    def arguments(self) -> tuple[str | None, ...]:
        key, value = self.label or (None, None)
        return self.state, self.topic, self.reason, key, value


FrameEnds = list[FrameEnd]
FrameArtifacts = list[FrameArtifact]


class _LayerRow(msgspec.Struct):
    """A layer as returned by `rota.layer_shown`."""

    id: LayerId
    number: int
    name: str
    queue: str
    frames: int
    work: bytes = b""
    input: bytes | None = None
    input_at: str | None = None
    first_frame: int = 0
    frame_step: int = 1
    ranges: list[int] = []
    succeeded: int = 0
    quarantined: int = 0
    failed: int = 0
    timed_out: int = 0
    cancelled: int = 0
    denied: int = 0
    took_ms: int = 0


class JobQueries:
    def __init__(self, database: Database) -> None:
        self.database = database

    async def get(self, job: JobId) -> JobView:
        row = await self.database.row(GET, [job])
        if row is None:
            raise NotFound(f"There is no job {job}, or it is not kept any more.", job=str(job))
        live = row["finished_at"] is None
        running = await self.database.rows(RUNNING, job) if live else []
        return _job_view(row, {each["pk_layer"]: each["frames"] for each in running})

    async def get_many(self, jobs: Sequence[JobId], *, on: Transaction | None = None) -> list[JobView]:
        """The jobs that exist, by id; booked frames count as waiting here."""
        rows = await (on or self.database).rows(GET, list(jobs)) if jobs else []
        return [_job_view(row, {}) for row in sorted(rows, key=lambda row: row["id"].bytes)]

    async def states(self, jobs: Sequence[JobId]) -> dict[JobId, JobState]:
        """The states of the jobs that exist."""
        return {JobId(row["id"]): JobState(row["state"]) for row in await self.database.rows(GET, list(jobs))}

    async def list(
        self,
        filter_: JobFilter | None = None,
        *,
        after: JobId | None = None,
        most: int = 50,
        scans_max: int = SCANS_MAX,
    ) -> JobPage:
        """Newest first. At most `scans_max` statements search for matching jobs: the page may then be short, and `next`
        continues from there."""
        if not 1 <= most <= PAGE_MAX:
            raise InvalidInput(f"{most} is not a valid number of jobs to list: use 1 to {PAGE_MAX}.")
        filter_ = filter_ or JobFilter()
        shows = await self._show_ids(filter_)
        items: list[JobSummary] = []
        window = most + 1 if filter_.is_unfiltered else max(most + 1, FIRST_SCAN_JOBS)
        for _ in range(scans_max):
            rows = await self.database.rows(LIST, shows, *filter_.arguments(), after, window, most + 1 - len(items))
            *found, rest = rows
            items += [_job_summary(row) for row in found]
            if len(items) > most:
                return JobPage(items[:most], items[most - 1].id)
            after = rest["before"]
            if after is None:
                return JobPage(items, None)
            window = SCAN_JOBS_MAX
        return JobPage(items, after)

    async def _show_ids(self, filter_: JobFilter) -> builtins.list[UUID] | None:
        if filter_.show is None:
            return None if filter_.shows is None else sorted(filter_.shows)
        show_id = await self.database.value(SHOW, filter_.show)
        if show_id is None:
            raise NotFound(f"There is no show {filter_.show[:64]!r}: `rota show list` lists all shows.")
        return [show_id]

    async def frame_ends(self, layer: LayerId, *, frame: int = 0, most: int = 100) -> FrameEnds:
        """Results and failures of frames from `frame` on; queue numbers."""
        rows = await self.database.rows(FRAME_ENDS, layer, frame, most)
        return [FrameEnd(**{**dict(row.items()), "state": FrameState(row["state"])}) for row in rows]

    async def artifacts(self, layer: LayerId, *, frame: int = 0, most: int = 100) -> FrameArtifacts:
        """Artifacts of at most `most` frames from `frame` on; queue numbers."""
        kept: FrameArtifacts = []
        for row in await self.database.rows(ARTIFACTS, layer, frame, most):
            for pointer, name in map(parse_artifact, row["artifacts"]):
                kept.append(FrameArtifact(row["frame"], row["attempt"], name, pointer))
        return kept

    async def withheld_outputs(
        self, layer: LayerId, *, frame: int = 0, most: int = 100, file: str | None = None
    ) -> dict[int, str]:
        """Frames whose outputs are withheld, with the restriction; `rota.model.policy.outputs.read_refusal` explains
        it.

        With `file`, a pointer: only frames with that artifact.
        """
        return {
            row["frame"]: row["output"] for row in await self.database.rows(WITHHELD_OUTPUTS, layer, frame, most, file)
        }

    async def artifact_totals(self, layers: Sequence[LayerId]) -> tuple[int, int]:
        """Number and total bytes of the artifacts of these layers."""
        row = await self.database.row(ARTIFACTS_SUM, list(layers))
        return (row["files"], row["bytes"]) if row is not None else (0, 0)


def _job_summary(row: Record) -> JobSummary:
    columns = dict(row.items())
    del columns["before"]
    columns |= {
        "state": JobState(row["state"]),
        "labels": msgspec.json.decode(row["labels"]) if row["labels"] else {},
    }
    return JobSummary(**columns)


def _job_view(row: Record, running: dict[UUID, int]) -> JobView:
    kept = msgspec.json.decode(row["layers"] or "[]", type=list[_LayerRow])
    columns = dict(row.items())
    columns |= {
        "state": JobState(row["state"]),
        "labels": msgspec.json.decode(row["labels"]) if row["labels"] else {},
        "details": decode_details(columns.pop("request")),
        "history": [job_history_entry(*each) for each in msgspec.json.decode(row["history"])],
        "layers": [_layer(each, running.get(each.id, 0), live=row["finished_at"] is None) for each in kept],
        "policy": _decode_policy_decision(row["policy"]),
    }
    return JobView(**columns)


def _decode_policy_decision(data: bytes | None) -> PolicyDecisionView | None:
    return None if data is None else policy_decision_view(msgspec.msgpack.decode(data, type=PolicyDecision))


def policy_decision_view(decision: PolicyDecision) -> PolicyDecisionView:
    return PolicyDecisionView(
        says=decision.says,
        rule=decision.rule,
        snapshot=decision.snapshot,
        reason=decision.reason,
        constraints=msgspec.to_builtins(decision.constraints) if decision.constraints is not None else {},
        remediations=decision.remediations,
    )


def job_history_entry(state: str, at_ms: int, reason: str | None = None) -> JobHistoryEntry:
    return JobHistoryEntry(JobState(state), datetime.fromtimestamp(at_ms / 1000, UTC), reason)


def _layer(kept: _LayerRow, running: int, *, live: bool) -> Layer:
    ended = (kept.succeeded, kept.quarantined, kept.failed, kept.timed_out, kept.cancelled, kept.denied)
    counts = {FrameState(state.value): n for state, n in zip(TERMINAL_STATES, ended, strict=True)}
    left = kept.frames - sum(ended) if live else 0
    # Bookings are counted a moment later than ends, so the count may exceed the remaining frames.
    counts |= {FrameState.DISPATCHED: min(running, left), FrameState.WAITING: left - min(running, left)}
    return Layer(
        id=kept.id,
        number=kept.number,
        name=kept.name,
        queue=kept.queue,
        work=work_view(msgspec.msgpack.decode(kept.work, type=Work) if kept.work else Work()),
        input=kept.input,
        input_at=kept.input_at,
        frames=FrameSet(
            kept.first_frame, kept.frames, kept.frame_step, tuple(zip(kept.ranges[::2], kept.ranges[1::2], strict=True))
        ),
        counts={state: n for state, n in counts.items() if n},
        took_ms=kept.took_ms,
    )
