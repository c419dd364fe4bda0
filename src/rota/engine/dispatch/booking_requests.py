"""What is booked for a claimed batch: frames by worker and charge, alone or in series. No I/O."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import islice
from typing import Final
from uuid import UUID

import msgspec

from rota.accounting.ledger import (
    NIL_UUID,
    BookingGroup,
    BookingOutcome,
    Charge,
    Followers,
    SingleFrameBatch,
)
from rota.engine.dispatch.pending_queues import PendingQueue
from rota.engine.dispatch.rounds import RoundPart
from rota.engine.dispatch.series import SeriesLength, SeriesLimit, SeriesSegment, split_into_series
from rota.model.ids import JobId, LayerId, PoolId
from rota.model.token_ranges import to_ranges
from rota.model.units import Centicores
from rota.placement import PlacementPlan
from rota.queue.claims import ClaimedRange

MESSAGE_BYTES_MAX: Final = 400_000
"""Of inputs, commands and environments in one message, unless it has a single range of frames, or a single series.
NATS accepts 1 MiB, which holds the largest input with the largest command and environment."""

LENGTH_TOLERANCE: Final = 2
"""A series may be so much longer than expected by now, if so many frames were claimed for it: giving some back costs
more than a series that takes a little longer."""


class LayerExecution(msgspec.Struct, frozen=True):
    """What the frames of a layer execute."""

    work: bytes
    input: bytes | None
    pointer: str | None
    capped: bool
    ends_as: str | None
    first_frame: int
    step: int
    single: bool = False
    """Its job has this frame only."""
    jobs_max: int = 0
    """Concurrent jobs of the show, from the policy decision that admitted the job; 0: unlimited."""
    may_rerun: bool = True
    """Whether that decision lets a frame run again whose worker was lost."""


class WorkerSlice(msgspec.Struct):
    """Frames of a claimed range that go to one worker."""

    claimed_range: ClaimedRange
    worker: UUID
    tokens: range
    runnable: LayerExecution
    series: int = 0
    """The carrier of its series; 0: it is in none."""
    trace: str = ""


class BookingRequest(msgspec.Struct):
    """Slices that are booked in one call, in token order."""

    parts: list[WorkerSlice]
    asked: BookingGroup | SingleFrameBatch


BookedSlice = tuple[WorkerSlice, Sequence[int]]
"""A slice and those of its tokens that were booked."""


Executions = dict[LayerId, LayerExecution]


class PartRequests(msgspec.Struct):
    """What is booked for a part of a round."""

    requests: list[BookingRequest]
    left_over: list[int] = []
    """Tokens for which there is no slot: the frames take longer than expected."""


def booking_requests(part: RoundPart, claimed: Sequence[ClaimedRange], executions: Executions) -> PartRequests:
    """Batch single frames of uncapped jobs per worker; book every other slice by itself."""
    pools = {portion.worker: portion.pool_id for portion in part.plan.portions}
    requests: list[BookingRequest] = []
    singles: dict[UUID, list[WorkerSlice]] = defaultdict(list)
    for piece in _slice_by_worker(claimed, part.plan, executions):
        if len(piece.tokens) == 1 and not piece.runnable.capped:
            singles[piece.worker].append(piece)
        else:
            charge = _charge(part.pending, pools[piece.worker], piece.claimed_range.job, piece.claimed_range.layer)
            group = BookingGroup(charge, piece.worker, piece.tokens, piece.runnable.capped)
            requests.append(BookingRequest([piece], group))
    for worker, alike in singles.items():
        tokens = [piece.tokens.start for piece in alike]
        jobs, layers = [piece.claimed_range.job for piece in alike], [piece.claimed_range.layer for piece in alike]
        charge = _charge(part.pending, pools[worker], JobId(NIL_UUID), LayerId(NIL_UUID))
        requests.append(BookingRequest(alike, SingleFrameBatch(charge, worker, tokens, jobs, layers)))
    return PartRequests(requests)


def series_limit(
    claimed: ClaimedRange, execution: LayerExecution, length: SeriesLength, longest: int, *, alike: bool
) -> SeriesLimit:
    """`longest`: frames that the claim was made for, per slot. `alike`: no quota counts jobs one by one, so frames of
    jobs that have only one may share a charge, unless they are capped."""
    most = length.frames_max
    return SeriesLimit(
        max(most, min(longest, LENGTH_TOLERANCE * most)) if most > 1 else 1,
        None if alike and execution.single and not execution.capped else claimed.layer,
        execution.work,
        len(claimed.payload or execution.input or b""),
    )


def series_requests(
    part: RoundPart,
    claimed: Sequence[ClaimedRange],
    executions: Executions,
    limits: Sequence[SeriesLimit],
    slots: int,
) -> PartRequests:
    """The same for frames in series: one series per slot, of which about so many are to be used."""
    pools = {portion.worker: portion.pool_id for portion in part.plan.portions}
    divided = list(split_into_series(claimed, slots, limits))
    used_share = min(1.0, len(divided) / part.plan.planned)
    series = iter(divided)
    of_layers: dict[tuple[UUID, LayerId], list[list[WorkerSlice]]] = defaultdict(list)
    mixed: dict[UUID, list[list[WorkerSlice]]] = defaultdict(list)
    for portion in part.plan.portions:
        for segments in islice(series, math.ceil(portion.n * used_share)):
            slices = _slices(segments, portion.worker, executions)
            layer = slices[0].claimed_range.layer
            alone = not slices[0].series and not slices[0].runnable.capped
            if alone or any(each.claimed_range.layer != layer for each in slices):
                mixed[portion.worker].append(slices)
            else:
                of_layers[portion.worker, layer].append(slices)
    requests: list[BookingRequest] = []
    for (worker, layer), found in of_layers.items():
        first = found[0][0]
        charge = _charge(part.pending, pools[worker], first.claimed_range.job, layer)
        carriers = [slices[-1].tokens[-1] for slices in found]
        group = BookingGroup(charge, worker, carriers, first.runnable.capped, series=_followers(found))
        requests.append(BookingRequest([each for slices in found for each in slices], group))
    for worker, found in mixed.items():
        last = [slices[-1] for slices in found]
        batch = SingleFrameBatch(
            _charge(part.pending, pools[worker], JobId(NIL_UUID), LayerId(NIL_UUID)),
            worker,
            [each.tokens[-1] for each in last],
            [each.claimed_range.job for each in last],
            [each.claimed_range.layer for each in last],
            series=_followers(found),
        )
        requests.append(BookingRequest([each for slices in found for each in slices], batch))
    return PartRequests(requests, [token for segments in series for segment in segments for token in segment.tokens])


def _slices(segments: Sequence[SeriesSegment], worker: UUID, executions: Executions) -> list[WorkerSlice]:
    carrier = segments[-1].tokens[-1]
    series = carrier if carrier > segments[0].tokens[0] else 0
    return [
        WorkerSlice(segment.claimed, worker, segment.tokens, executions[segment.claimed.layer], series)
        for segment in segments
    ]


def _followers(found: Sequence[Sequence[WorkerSlice]]) -> dict[int, Followers]:
    return {
        slices[-1].series: Followers(
            [token for each in slices for token in each.tokens][:-1],
            [each.claimed_range.job for each in slices for _ in each.tokens][:-1],
            [each.claimed_range.layer for each in slices for _ in each.tokens][:-1],
        )
        for slices in found
        if slices[-1].series
    }


def _slice_by_worker(
    claimed: Sequence[ClaimedRange], plan: PlacementPlan, executions: dict[LayerId, LayerExecution]
) -> list[WorkerSlice]:
    """Map frames, in order, onto the portions of the plan, in order."""
    portions = iter(plan.portions)
    parts: list[WorkerSlice] = []
    worker, left = UUID(int=0), 0
    for claimed_range in claimed:
        first = claimed_range.tokens.start
        while first < claimed_range.tokens.stop:
            if left == 0:
                portion = next(portions)
                worker, left = portion.worker, portion.n
            n = min(left, claimed_range.tokens.stop - first)
            parts.append(WorkerSlice(claimed_range, worker, range(first, first + n), executions[claimed_range.layer]))
            first += n
            left -= n
    return parts


def split_by_size(slices: Sequence[BookedSlice]) -> list[list[BookedSlice]]:
    """Group the slices into few messages that fit. A message has the work of each layer once, and the input of a slice
    with each of its ranges. A series is not divided: its worker must know all of it."""
    if sum(len(part.runnable.work) + _input_bytes(part) * len(booked) for part, booked in slices) <= MESSAGE_BYTES_MAX:
        return [list(slices)]
    messages: list[list[BookedSlice]] = []
    works, size, series = set[bytes](), MESSAGE_BYTES_MAX, 0
    for part, booked in slices:
        work = part.runnable.work
        for token, n in to_ranges(booked):
            more = _input_bytes(part) + (0 if work in works else len(work))
            goes_on = series == part.series != 0
            series = part.series
            if size + more > MESSAGE_BYTES_MAX and not goes_on:
                messages.append([])
                works, size, more = set(), 0, _input_bytes(part) + len(work)
            messages[-1].append((part, range(token, token + n)))
            works.add(work)
            size += more
    return messages


def _input_bytes(part: WorkerSlice) -> int:
    return len(part.claimed_range.payload or part.runnable.input or b"")


def _charge(pending: PendingQueue, pool: PoolId, job: JobId, layer: LayerId) -> Charge:
    need = pending.key.cls.need
    return Charge(pool, pending.key.folder, job, layer, pending.key.dept, Centicores(need.cores), need.gpus)


def booked_slices(request: BookingRequest, outcome: BookingOutcome) -> list[BookedSlice]:
    """Slices with frames that are booked, and those frames."""
    booked = outcome.booked if not outcome.already else sorted(outcome.all_booked)
    if not booked:
        return []
    if not request.asked.series:
        return _booked_alone(request, booked)
    tokens = set(booked)
    found: list[BookedSlice] = []
    for part in request.parts:
        if part.series in tokens:
            declined = [token for token in part.tokens if token in outcome.declined] if outcome.declined else []
            found.append((part, part.tokens if not declined else [t for t in part.tokens if t not in declined]))
        elif not part.series and tokens.intersection(part.tokens):
            found.append((part, [token for token in part.tokens if token in tokens]))
    return [(part, tokens) for part, tokens in found if tokens]


def _booked_alone(request: BookingRequest, booked: Sequence[int]) -> list[BookedSlice]:
    """A request of several slices without series has one frame in each."""
    if len(request.parts) == 1:
        return [(request.parts[0], booked)]
    if len(booked) == len(request.parts):
        return [(part, part.tokens) for part in request.parts]
    tokens = set(booked)
    return [(part, part.tokens) for part in request.parts if part.tokens.start in tokens]


def job_of(request: BookingRequest, token: int) -> JobId:
    return next(part.claimed_range.job for part in request.parts if token in part.tokens)


def frames_with(request: BookingRequest, carriers: Sequence[int]) -> list[int]:
    """These tokens, and the frames that are in series with them."""
    if not request.asked.series:
        return list(carriers)
    series = request.asked.series_of(carriers)
    return [*carriers, *(token for followers in series.values() for token in followers.tokens)]
