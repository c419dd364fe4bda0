"""Plans as the columns of one statement. No I/O.

What many jobs or layers of a batch have in common travels once and is named by its place, from 1 on: a thousand jobs of
one task are one head, one kind of layer, and a column of ids and inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import msgspec

from rota.engine.gate import Decision
from rota.infra.store import Where, pointer_to
from rota.model.ids import JobId, LayerId
from rota.model.job import decode_details, encode_details
from rota.model.job_plan import Caps, LayerPlan, Plan
from rota.model.job_plan import Place as Asked
from rota.model.lifecycle import JobState

INPUT_BYTES_MAX: Final = 65_536
"""What is larger does not travel with a frame, but a pointer to it."""
Column = list[Any]
PlaceKey = tuple[str, str, str, bytes, int]
Shape = tuple[int, list[tuple[int, int]]]
"""The place of a job's head; and of each layer, the place it is queued at and that of its kind."""


class Distinct:
    """Tuples, each once, by their place from 1 on."""

    def __init__(self) -> None:
        self._places: dict[tuple[Any, ...], int] = {}

    def place(self, row: tuple[Any, ...]) -> int:
        return self._places.setdefault(row, len(self._places) + 1)

    def columns(self, width: int) -> list[Column]:
        return [list(column) for column in zip(*self._places, strict=True)] or [[] for _ in range(width)]

    def __iter__(self) -> Any:
        return iter(self._places)


class Columns:
    """Arguments of submit_insert.sql, in its order."""

    def __init__(self) -> None:
        self.places = Distinct()
        self.asked: dict[PlaceKey, Asked] = {}
        self.large: list[bytes] = []
        """Inputs and items that rows only point to; they belong into the store."""
        self._heads = Distinct()
        self._kinds = Distinct()
        self._shapes: dict[tuple[int, int], tuple[Plan, Decision, Shape]] = {}
        """By the ids of the plan they are like and of the decision, which are kept so that no others have them."""
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

    def add(self, plan: Plan, decision: Decision, job: JobId, layers: Sequence[LayerId]) -> None:
        head, kinds = self._shape(plan, decision)
        ids, heads, workflows, keys, digests = self._jobs
        ids.append(job)
        heads.append(head)
        workflows.append(plan.workflow_id)
        keys.append(plan.key)
        digests.append(plan.digest)
        if plan.caps is not None:
            self._cap(plan.caps, job, None, kinds[0][0], plan.priority)
        scheduled = decision.state is JobState.SCHEDULED
        for layer, of, (place, kind) in zip(layers, plan.layers, kinds, strict=True):
            self._layer(of, kind, layer)
            if of.caps is not None:
                self._cap(of.caps, job, layer, place, plan.priority)
            if scheduled:
                self._queue(of, place, job, layer, plan.run_at)
            elif of.items:
                self._items[0].extend([layer] * len(of.items))
                self._items[1].extend(of.items)

    def arguments(self, until: datetime | None = None) -> tuple[object, ...]:
        """`until`: when the words that jobs are queued by have become too old."""
        *jobs, workflows, keys, digests = self._jobs
        jobs += [_some(workflows), *((keys, digests) if any(keys) else (None, None))]
        *layers, input_ats = self._layers
        *entries, payloads, run_ats = self._entries
        caps = self._caps if self._caps[0] else (None,) * 6
        items = self._items if self._items[0] else (None, None)
        *heads, words = self._heads.columns(13)
        shared = [*self.places.columns(5), *heads, _some(words), until, *self._kinds.columns(9)]
        rows = (*layers, _some(input_ats), *entries, _some(payloads), _some(run_ats))
        return (*shared, *jobs, *rows, *caps, *items)

    def _shape(self, plan: Plan, decision: Decision) -> Shape:
        """Of plans that are like one another it is the same, and found out once."""
        like = plan.like
        if like is None or plan.name != like.name:
            return self._shape_of(plan, decision)
        known = self._shapes.get((id(like), id(decision)))
        if known is None:
            known = self._shapes[id(like), id(decision)] = like, decision, self._shape_of(plan, decision)
        return known[2]

    def _shape_of(self, plan: Plan, decision: Decision) -> Shape:
        kinds = [self._kind(plan, of, number) for number, of in enumerate(plan.layers)]
        state, reason = decision.state.value, decision.reason or None
        details = self._keep_items(plan) if any(layer.items for layer in plan.layers) else plan.details
        head = (
            *(kinds[0][0], plan.name, plan.topic, plan.priority, state, reason, len(plan.layers)),
            *(plan.labels, details, plan.deadline_ms, _ms(plan.max_wait_s), plan.run_at),
            decision.said.digest if decision.said is not None else None,
        )
        return self._heads.place(head), kinds

    def _kind(self, plan: Plan, of: LayerPlan, number: int) -> tuple[int, int]:
        place, frames = self._place(plan, of), of.frames
        ranges = _array(frames.ranges) if frames.ranges else None
        capped = plan.caps is not None or of.caps is not None
        kind = (place, number, of.name, of.work, frames.first, frames.step, frames.count, ranges, capped)
        return place, self._kinds.place(kind)

    def _keep_items(self, plan: Plan) -> bytes | None:
        """Details that say where the items are: the queue forgets them with the frames they belong to."""
        kept = msgspec.msgpack.encode([layer.items for layer in plan.layers if layer.items])
        self.large.append(kept)
        at = str(pointer_to(kept, Where.POSTGRES))
        return encode_details(msgspec.structs.replace(decode_details(plan.details), items_at=at))

    def _place(self, plan: Plan, layer: LayerPlan) -> int:
        key = (plan.show, plan.folder, plan.dept, layer.digest, plan.priority)
        self.asked[key] = layer.place
        return self.places.place(key)

    def _layer(self, of: LayerPlan, kind: int, layer: LayerId) -> None:
        ids, jobs, kinds, inputs, input_ats = self._layers
        ids.append(layer)
        jobs.append(len(self._jobs[0]))
        kinds.append(kind)
        if of.input is not None and len(of.input) > INPUT_BYTES_MAX:
            self.large.append(of.input)
            inputs.append(None)
            input_ats.append(str(pointer_to(of.input, Where.POSTGRES)))
        else:
            inputs.append(of.input)
            input_ats.append(None)

    def _queue(self, of: LayerPlan, place: int, job: UUID, layer: UUID, run_at: datetime | None) -> None:
        places, jobs, layers, frames, counts, payloads, run_ats = self._entries
        if of.items:
            n = len(of.items)
            frames.extend(of.frames.places())
            counts.extend([1] * n)
            payloads.extend(of.items)
        else:
            n = 0
            for first, count in of.frames.in_queue():
                n += 1
                frames.append(first)
                counts.append(count)
                payloads.append(None)
        places.extend([place] * n)
        jobs.extend([job] * n)
        layers.extend([layer] * n)
        run_ats.extend([run_at] * n)

    def _cap(self, caps: Caps, job: JobId, layer: LayerId | None, place: int, priority: int) -> None:
        for column, value in zip(self._caps, (job, layer, place, priority, caps.cores, caps.gpus), strict=True):
            column.append(value)


def _some(column: Column) -> Column | None:
    """A column that holds nothing need not be sent."""
    return column if any(each is not None for each in column) else None


def queue_columns(columns: Columns) -> tuple[object, ...]:
    """Arguments of submit_queues.sql."""
    rows = [
        (
            *key[:4],
            *(asked.topic, _json(asked.requires), _json(dict(asked.labels)), asked.preferred_pool),
            *(asked.preferred_worker, asked.cores, asked.gpus, asked.memory_mb),
        )
        for key, asked in columns.asked.items()
    ]
    return tuple(list(column) for column in zip(*rows, strict=True))


def _array(ranges: Sequence[tuple[int, int]]) -> str:
    return "{" + ",".join(f"{first},{count}" for first, count in ranges) + "}"


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _ms(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1000)
