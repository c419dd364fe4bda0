"""Builds the submission of a new job from the rows of an old one. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final
from uuid import UUID

import msgspec

from rota.infra.postgres import Record
from rota.model.errors import InvalidInput
from rota.model.jobs.frame_ranges import FrameSet
from rota.model.jobs.submission import SubmissionDetails, decode_details, encode_details
from rota.model.jobs.validation import PlacementSpec, ResourceCaps, ValidatedLayer, ValidatedSubmission
from rota.model.token_ranges import to_ranges

RETRY_OF: Final = "retry_of"
FramesByLayer = dict[UUID, dict[int, bytes | None]]
"""By layer: queue numbers of frames, each with its item if it has one."""


ItemsByLayer = Mapping[int, Sequence[bytes]]
"""By layer number: the items of its frames, in their order."""


def resubmission_plan(
    layers: Sequence[Record],
    selected: FramesByLayer | None,
    inputs: Mapping[UUID, bytes],
    items: ItemsByLayer | None = None,
) -> ValidatedSubmission:
    """The submission for the selected frames, or for all of them."""
    job = layers[0]
    if None in (job["show"], job["folder"], job["dept"]):
        raise InvalidInput(f"The show, folder or department of job {job['pk_job']} is gone: submit it to another one.")
    details = decode_details(job["request"])
    chosen = [row for row in layers if selected is None or row["pk_layer"] in selected]
    plans = tuple(_layer_plan(row, _frames(row, selected, details, items or {}), inputs) for row in chosen)
    numbers = {row["number"]: at for at, row in enumerate(chosen)}
    return ValidatedSubmission(
        show=job["show"],
        folder=job["folder"],
        dept=job["dept"],
        name=job["name"],
        topic=job["topic"],
        priority=job["priority"],
        layers=plans,
        labels=_labels(job),
        details=encode_details(_details(details, job["pk_job"], numbers)),
        workflow_id=job["workflow_id"],
        deadline_ms=(details.budget.deadline_ms or None) if details.budget else None,
        max_wait_s=details.max_wait_s or None,
        caps=_caps(job["job_cores"], job["job_gpus"]),
    )


def _details(of: SubmissionDetails, parent: UUID, numbers: Mapping[int, int]) -> SubmissionDetails:
    maps = tuple(numbers[number] for number in of.maps if number in numbers)
    return msgspec.structs.replace(of, parent_job_id=parent, idempotency_key="", maps=maps, items_at="", trace="")


def _labels(job: Record) -> str:
    labels: dict[str, str] = msgspec.json.decode(job["labels"]) if job["labels"] else {}
    return msgspec.json.encode({**labels, RETRY_OF: str(job["pk_job"])}).decode()


def _layer_plan(row: Record, given: tuple[FrameSet, tuple[bytes, ...]], inputs: Mapping[UUID, bytes]) -> ValidatedLayer:
    frames, items = given
    if row["digest"] is None:
        raise InvalidInput(f"The queue {row['queue']} of job {row['pk_job']} is gone: submit it again.")
    return ValidatedLayer(
        name=row["layer"],
        place=_placement_spec(row),
        digest=row["digest"],
        work=row["work"],
        frames=frames,
        input=inputs.get(row["pk_layer"], row["input"]),
        items=items,
        caps=_caps(row["layer_cores"], row["layer_gpus"]),
    )


def _frames(
    row: Record, selected: FramesByLayer | None, details: SubmissionDetails, items: ItemsByLayer
) -> tuple[FrameSet, tuple[bytes, ...]]:
    mapped = row["number"] in details.maps
    if selected is not None:
        return _selected_frames(row, selected[row["pk_layer"]], mapped=mapped)
    given = row["ranges"] or []
    frames = FrameSet(
        row["first_frame"], row["frames"], row["frame_step"], tuple(zip(given[::2], given[1::2], strict=True))
    )
    stored = tuple(items.get(row["number"], ())) if mapped else ()
    if mapped and len(stored) != frames.count:
        raise InvalidInput(
            f"The items of layer {row['layer']} are no longer retained: retry the failed frames, or submit them again."
        )
    return frames, stored


def _selected_frames(
    row: Record, selected: Mapping[int, bytes | None], *, mapped: bool
) -> tuple[FrameSet, tuple[bytes, ...]]:
    places = sorted(selected)
    items = tuple(item for place in places if (item := selected[place]) is not None) if mapped else ()
    return FrameSet(row["first_frame"], len(places), row["frame_step"], tuple(to_ranges(places))), items


def _placement_spec(row: Record) -> PlacementSpec:
    labels = msgspec.json.decode(row["place_labels"], type=dict[str, str])
    return PlacementSpec(
        row["place_topic"],
        tuple(row["requires"]),
        tuple(sorted(labels.items())),
        row["preferred_pool"] or "",
        row["preferred_worker"] or "",
        row["cores"],
        row["gpus"],
        row["memory_mb"],
    )


def _caps(cores: int | None, gpus: int | None) -> ResourceCaps | None:
    caps = ResourceCaps(-1 if cores is None else cores, -1 if gpus is None else gpus)
    return caps if caps.cores > 0 or caps.gpus > 0 else None
