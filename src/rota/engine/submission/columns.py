"""Submissions as the column arrays of one statement. No I/O.

Values shared by several jobs or layers are sent once and referenced by a 1-based index: a thousand jobs of one task
are one head, one layer kind, and columns of ids and inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import msgspec

from rota.engine.admission.decision import AdmissionDecision
from rota.infra.blob_store import BlobLocation, pointer_to
from rota.model.ids import JobId, LayerId
from rota.model.job_states import JobState
from rota.model.jobs.submission import decode_details, encode_details
from rota.model.jobs.validation import PlacementSpec, ResourceCaps, ValidatedLayer, ValidatedSubmission

INPUT_BYTES_MAX: Final = 65_536
"""Larger inputs go to the blob store, and the frame carries a pointer."""
Column = list[Any]
QueueTargetKey = tuple[str, str, str, bytes, int]
JobShape = tuple[int, list[tuple[int, int]]]
"""Index of the job's head; and for each layer, the index of its queue target and of its kind."""


class DistinctRows:
    """Distinct tuples, addressed by a 1-based index."""

    def __init__(self) -> None:
        self._places: dict[tuple[Any, ...], int] = {}

    def index_of(self, row: tuple[Any, ...]) -> int:
        return self._places.setdefault(row, len(self._places) + 1)

    def columns(self, width: int) -> list[Column]:
        return [list(column) for column in zip(*self._places, strict=True)] or [[] for _ in range(width)]

    def __iter__(self) -> Any:
        return iter(self._places)


class SubmissionColumns:
    """Arguments of the query `submit_insert`, in its order."""

    def __init__(self) -> None:
        self.places = DistinctRows()
        self.targets: dict[QueueTargetKey, PlacementSpec] = {}
        self.large: list[bytes] = []
        """Inputs and items that rows reference by pointer; the caller writes them to the blob store."""
        self._heads = DistinctRows()
        self._kinds = DistinctRows()
        self._shapes: dict[tuple[int, int], tuple[ValidatedSubmission, AdmissionDecision, JobShape]] = {}
        """By the ids of the template submission and the decision; both are kept alive so that their ids stay unique."""
        self._jobs: tuple[list[JobId], list[int], list[str | None], list[str | None], list[bytes | None]] = (
            [],
            [],
            [],
            [],
            [],
        )
        self._layers: tuple[list[LayerId], list[int], list[int], list[bytes | None], list[str | None]] = (
            [],
            [],
            [],
            [],
            [],
        )
        self._entries: tuple[Column, ...] = ([], [], [], [], [], [], [])
        self._caps: tuple[Column, ...] = ([], [], [], [], [], [])
        self._items: tuple[list[LayerId], list[bytes]] = ([], [])

    def add(
        self, plan: ValidatedSubmission, decision: AdmissionDecision, job: JobId, layers: Sequence[LayerId]
    ) -> None:
        head, kinds = self._shape(plan, decision)
        ids, heads, workflows, keys, digests = self._jobs
        ids.append(job)
        heads.append(head)
        workflows.append(plan.workflow_id)
        keys.append(plan.key)
        digests.append(plan.digest)
        if plan.caps is not None:
            self._add_cap(plan.caps, job, None, kinds[0][0], plan.priority)
        scheduled = decision.state is JobState.SCHEDULED
        for layer, of, (place, kind) in zip(layers, plan.layers, kinds, strict=True):
            self._add_layer(of, kind, layer)
            if of.caps is not None:
                self._add_cap(of.caps, job, layer, place, plan.priority)
            if scheduled:
                self._add_entries(of, place, job, layer, plan.run_at)
            elif of.items:
                self._items[0].extend([layer] * len(of.items))
                self._items[1].extend(of.items)

    def arguments(self, until: datetime | None = None) -> tuple[object, ...]:
        """`until`: expiry of the policy decisions by which jobs are queued."""
        *jobs, workflows, keys, digests = self._jobs
        jobs += [_none_if_empty(workflows), *((keys, digests) if any(keys) else (None, None))]
        *layers, input_ats = self._layers
        *entries, payloads, run_ats = self._entries
        caps = self._caps if self._caps[0] else (None,) * 6
        items = self._items if self._items[0] else (None, None)
        *heads, decisions = self._heads.columns(13)
        shared = [*self.places.columns(5), *heads, _none_if_empty(decisions), until, *self._kinds.columns(9)]
        rows = (*layers, _none_if_empty(input_ats), *entries, _none_if_empty(payloads), _none_if_empty(run_ats))
        return (*shared, *jobs, *rows, *caps, *items)

    def _shape(self, plan: ValidatedSubmission, decision: AdmissionDecision) -> JobShape:
        """Submissions with the same template share a shape, which is computed once."""
        template = plan.like
        if template is None or plan.name != template.name:
            return self._shape_of(plan, decision)
        cached = self._shapes.get((id(template), id(decision)))
        if cached is None:
            cached = self._shapes[id(template), id(decision)] = template, decision, self._shape_of(plan, decision)
        return cached[2]

    def _shape_of(self, plan: ValidatedSubmission, decision: AdmissionDecision) -> JobShape:
        kinds = [self._kind(plan, of, number) for number, of in enumerate(plan.layers)]
        state, reason = decision.state.value, decision.reason or None
        details = self._store_items(plan) if any(layer.items for layer in plan.layers) else plan.details
        head = (
            *(kinds[0][0], plan.name, plan.topic, plan.priority, state, reason, len(plan.layers)),
            *(plan.labels, details, plan.deadline_ms, milliseconds(plan.max_wait_s), plan.run_at),
            decision.said.digest if decision.said is not None else None,
        )
        return self._heads.index_of(head), kinds

    def _kind(self, plan: ValidatedSubmission, of: ValidatedLayer, number: int) -> tuple[int, int]:
        place, frames = self._queue_index(plan, of), of.frames
        ranges = _array(frames.ranges) if frames.ranges else None
        capped = plan.caps is not None or of.caps is not None
        kind = (place, number, of.name, of.work, frames.first, frames.step, frames.count, ranges, capped)
        return place, self._kinds.index_of(kind)

    def _store_items(self, plan: ValidatedSubmission) -> bytes | None:
        """Details that reference the stored items: the queue deletes items with their frames."""
        items = msgspec.msgpack.encode([layer.items for layer in plan.layers if layer.items])
        self.large.append(items)
        at = str(pointer_to(items, BlobLocation.POSTGRES))
        return encode_details(msgspec.structs.replace(decode_details(plan.details), items_at=at))

    def _queue_index(self, plan: ValidatedSubmission, layer: ValidatedLayer) -> int:
        key = (plan.show, plan.folder, plan.dept, layer.digest, plan.priority)
        self.targets[key] = layer.place
        return self.places.index_of(key)

    def _add_layer(self, of: ValidatedLayer, kind: int, layer: LayerId) -> None:
        ids, jobs, kinds, inputs, input_ats = self._layers
        ids.append(layer)
        jobs.append(len(self._jobs[0]))
        kinds.append(kind)
        if of.input is not None and len(of.input) > INPUT_BYTES_MAX:
            self.large.append(of.input)
            inputs.append(None)
            input_ats.append(str(pointer_to(of.input, BlobLocation.POSTGRES)))
        else:
            inputs.append(of.input)
            input_ats.append(None)

    def _add_entries(self, of: ValidatedLayer, place: int, job: UUID, layer: UUID, run_at: datetime | None) -> None:
        places, jobs, layers, frames, counts, payloads, run_ats = self._entries
        if of.items:
            n = len(of.items)
            frames.extend(of.frames.queue_numbers())
            counts.extend([1] * n)
            payloads.extend(of.items)
        else:
            n = 0
            for first, count in of.frames.queue_ranges():
                n += 1
                frames.append(first)
                counts.append(count)
                payloads.append(None)
        places.extend([place] * n)
        jobs.extend([job] * n)
        layers.extend([layer] * n)
        run_ats.extend([run_at] * n)

    def _add_cap(self, caps: ResourceCaps, job: JobId, layer: LayerId | None, place: int, priority: int) -> None:
        for column, value in zip(self._caps, (job, layer, place, priority, caps.cores, caps.gpus), strict=True):
            column.append(value)


def _none_if_empty(column: Column) -> Column | None:
    """Send NULL instead of a column without values."""
    return column if any(each is not None for each in column) else None


def queue_columns(columns: SubmissionColumns) -> tuple[object, ...]:
    """Arguments of the query `submit_queues`."""
    rows = [
        (
            *key[:4],
            *(spec.topic, _json(spec.requires), _json(dict(spec.labels)), spec.preferred_pool),
            *(spec.preferred_worker, spec.cores, spec.gpus, spec.memory_mb),
        )
        for key, spec in columns.targets.items()
    ]
    return tuple(list(column) for column in zip(*rows, strict=True))


def _array(ranges: Sequence[tuple[int, int]]) -> str:
    return "{" + ",".join(f"{first},{count}" for first, count in ranges) + "}"


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1000)
