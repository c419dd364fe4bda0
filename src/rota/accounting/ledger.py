"""The contract of both ledgers: what a booking is, what comes back, and what every ledger promises.

- All or nothing per frame: a frame is booked at all five levels and has a `proc` row, or neither.
- No level passes its limit (`rota.model.quota` says what a limit means), unless `force` is given.
- Batches: groups are served in the order given; within a group the first tokens are booked and the rest refused.
- Repeating is free: a token that is booked is told as `already` and counted once; one that is released is gone:
  releasing it again changes nothing, and booking it again is declined as `tombstoned`, at least while the fence of its
  show stands. A reply that was lost is had again by calling again.
- A refusal is data, not an error. Errors mean that nothing is known to have happened (`Unavailable`) or that the
  call made no sense (`InvalidInput`), and then nothing happened.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import ClassVar, Final, Protocol
from uuid import UUID

import msgspec

from rota.infra.telemetry import metrics
from rota.model.errors import InvalidInput
from rota.model.ids import DeptId, FolderId, JobId, LayerId, PoolId, ShowId
from rota.model.quota import Ask, Level, Refusal, Usage
from rota.model.units import CENTICORES_MAX, Centicores

BOOKED = metrics.counter("rota_accounting_booked", "Frames booked.", labels=("ledger",))
REFUSED = metrics.counter(
    "rota_accounting_limit_exceeded", "Frames refused by a limit.", labels=("ledger", "table", "resource")
)
DECLINED = metrics.counter(
    "rota_accounting_declined", "Frames not booked for another reason than a limit.", labels=("ledger", "reason")
)

TOKEN_END: Final = 2**53
"""Tokens lie below this, so that every store and every JSON reader holds them exactly."""
BATCH_MAX: Final = 4096
GPUS_MAX: Final = 2**31 - 1


class DeclineReason(StrEnum):
    """Why a token was not inserted now, other than for a limit."""

    ALREADY = "already"
    DUPLICATE = "duplicate"
    TOMBSTONED = "tombstoned"
    STALE_FENCE = "stale_fence"
    UNSEEDED = "unseeded"
    REDIS_OFF = "redis_off"
    NOT_MANAGED = "not_managed"
    MANAGED = "managed"
    CAPPED = "capped"
    UNKNOWN_SHOW = "unknown_show"
    NO_SUBSCRIPTION = "no_subscription"
    UNKNOWN_FOLDER = "unknown_folder"
    UNKNOWN_JOB = "unknown_job"
    UNKNOWN_LAYER = "unknown_layer"
    UNKNOWN_DEPT = "unknown_dept"


class Charge(msgspec.Struct, frozen=True):
    """What one token holds, and where it is counted."""

    alloc: PoolId
    folder: FolderId
    job: JobId
    layer: LayerId
    dept: DeptId
    cores: Centicores
    gpus: int = 0

    @property
    def ask(self) -> Ask:
        return Ask(self.cores, self.gpus)

    def key(self, level: Level) -> UUID:
        """The id this charge is counted under at `level`; subscriptions and points go by pool and department."""
        match level:
            case Level.SUBSCRIPTION:
                return self.alloc
            case Level.FOLDER:
                return self.folder
            case Level.JOB:
                return self.job
            case Level.LAYER:
                return self.layer
            case Level.POINT:
                return self.dept


class BookingGroup(msgspec.Struct, frozen=True):
    """Frames with one charge, for one host. A `range` of tokens travels and is stored as such."""

    charge: Charge
    host: UUID
    tokens: Sequence[int]
    capped: bool = True
    """False when neither job nor layer had caps when the caller read them, which spares the live ledger a look: a cap
    that is set later raises the fence, and what was booked without it is refused."""

    def subset(self, tokens: Sequence[int]) -> BookingGroup:
        """The same for some of its tokens, in the order given."""
        return BookingGroup(self.charge, self.host, tokens, self.capped)


class SingleFrameBatch(msgspec.Struct, frozen=True):
    """Single frames that are alike in all but their job and layer: as if each were a group that is not capped.

    Most jobs have one frame. As columns they cost a tenth of what they cost as groups.
    """

    charge: Charge
    """What each of them holds; its job and layer are nobody's."""
    host: UUID
    tokens: Sequence[int]
    jobs: Sequence[JobId]
    layers: Sequence[LayerId]
    capped: ClassVar[bool] = False

    def subset(self, tokens: Sequence[int]) -> SingleFrameBatch:
        if tokens == self.tokens[: len(tokens)]:
            n = len(tokens)
            return SingleFrameBatch(self.charge, self.host, tokens, self.jobs[:n], self.layers[:n])
        at = {token: place for place, token in enumerate(self.tokens)}
        places = [at[token] for token in tokens]
        jobs, layers = [self.jobs[place] for place in places], [self.layers[place] for place in places]
        return SingleFrameBatch(self.charge, self.host, tokens, jobs, layers)

    def groups(self) -> list[BookingGroup]:
        like = self.charge
        return [
            BookingGroup(
                Charge(like.alloc, like.folder, job, layer, like.dept, like.cores, like.gpus),
                self.host,
                (token,),
                capped=False,
            )
            for token, job, layer in zip(self.tokens, self.jobs, self.layers, strict=True)
        ]


BookingBatch = Sequence[BookingGroup | SingleFrameBatch]
NIL_UUID: Final = UUID(int=0)
"""The host of what is released, job and layer of a swarm's charge: nobody asks."""


class BookingOutcome(msgspec.Struct, frozen=True):
    """What came of one group. Each of its tokens is in exactly one of the four."""

    booked: Sequence[int] = ()
    already: Sequence[int] = ()
    refused: Sequence[int] = ()
    declined: Mapping[int, DeclineReason] = {}
    refusal: Refusal | None = None
    """What refused the first of `refused`."""

    @property
    def all_booked(self) -> list[int]:
        """Tokens that are booked now, by this call or an earlier one."""
        return [*self.booked, *self.already]


class ReleasedTokens(msgspec.Struct, frozen=True):
    """Tokens that were booked under one charge and are no longer."""

    charge: Charge
    tokens: Sequence[int]


QuotaKey = tuple[Level, UUID]


class Ledger(Protocol):
    """One show per call; see the module's promises."""

    async def book(self, show: ShowId, groups: BookingBatch, *, force: bool = False) -> list[BookingOutcome]:
        """An outcome per group or swarm, in order. `force` asks no limit."""
        ...

    async def release(self, show: ShowId, tokens: Iterable[int]) -> list[ReleasedTokens]:
        """Give back what these tokens hold; tokens that hold nothing are left out of the answer."""
        ...

    async def counters(self, show: ShowId) -> dict[QuotaKey, Usage]:
        """What is counted at each key of the show; keys at 0 may be left out."""
        ...


def token_ranges(tokens: Iterable[int]) -> Iterator[tuple[int, int]]:
    """First and last of each stretch of consecutive tokens, in the order given."""
    if isinstance(tokens, range) and tokens.step == 1:
        if tokens:
            yield tokens.start, tokens.stop - 1
        return
    first = last = None
    for token in tokens:
        if last is not None and token == last + 1:
            last = token
            continue
        if first is not None and last is not None:
            yield first, last
        first = last = token
    if first is not None and last is not None:
        yield first, last


def expand_single_frames(groups: BookingBatch) -> list[BookingGroup]:
    """With a group for each frame of a swarm."""
    return [each for group in groups for each in ([group] if isinstance(group, BookingGroup) else group.groups())]


def collapse_outcomes(groups: BookingBatch, outcomes: Sequence[BookingOutcome]) -> list[BookingOutcome]:
    """What came of groups that were taken `apart`, one for each of those they came from.

    A frame of a swarm whose job or layer has caps by now, and that these refuse, is declined as capped: only a group
    can say which cap it was.
    """
    left = iter(outcomes)
    return [
        next(left) if isinstance(group, BookingGroup) else _sum_outcomes([next(left) for _ in group.tokens])
        for group in groups
    ]


def _sum_outcomes(outcomes: Sequence[BookingOutcome]) -> BookingOutcome:
    refusing: list[BookingOutcome] = []
    by_own_cap: list[BookingOutcome] = []
    for each in outcomes:
        if each.refusal is not None:
            (by_own_cap if each.refusal.table in (Level.JOB, Level.LAYER) else refusing).append(each)
    declined = {token: why for each in outcomes for token, why in each.declined.items()}
    return BookingOutcome(
        booked=[token for each in outcomes for token in each.booked],
        already=[token for each in outcomes for token in each.already],
        refused=[token for each in refusing for token in each.refused],
        declined=declined | {token: DeclineReason.CAPPED for each in by_own_cap for token in each.refused},
        refusal=refusing[0].refusal if refusing else None,
    )


def check_booking(groups: BookingBatch) -> None:
    """Refuse asks that make no sense, before anything is sent."""
    for group in groups:
        _check_charge(group.charge)
        if isinstance(group, SingleFrameBatch) and not len(group.tokens) == len(group.jobs) == len(group.layers):
            raise InvalidInput("A swarm has a job and a layer for each of its tokens: give columns of one length.")
    spans = sorted(run for group in groups for run in token_ranges(group.tokens))
    if sum(last - first + 1 for first, last in spans) > BATCH_MAX:
        raise InvalidInput(f"A batch holds at most {BATCH_MAX} frames: book them in several calls.")
    check_tokens(spans)
    for (_, last), (first, _) in pairwise(spans):
        if first <= last:
            raise InvalidInput(f"Token {first} is twice in one batch: each attempt of a frame has a token of its own.")


def check_tokens(spans: Sequence[tuple[int, int]]) -> None:
    """Refuse runs of tokens, in order, that leave the range of tokens."""
    if spans and (spans[0][0] < 0 or spans[-1][1] >= TOKEN_END):
        raise InvalidInput("A token is a whole number from 0 to 2^53 - 1: take tokens from the claim of the frames.")


def _check_charge(charge: Charge) -> None:
    if not 0 <= charge.cores <= CENTICORES_MAX or not 0 <= charge.gpus <= GPUS_MAX:
        raise InvalidInput(
            f"A frame cannot ask for {charge.cores} hundredths of a core and {charge.gpus} GPUs: give amounts from 0"
            f" to {CENTICORES_MAX}.",
        )
    if charge.cores == 0 and charge.gpus == 0:
        raise InvalidInput("A frame must ask for cores or GPUs: give it at least a hundredth of a core.")


def retryable_groups(
    groups: BookingBatch, outcomes: Sequence[BookingOutcome], why: Collection[DeclineReason]
) -> dict[int, BookingGroup | SingleFrameBatch]:
    """What was declined for one of these reasons, by the place of its group, to be tried again in the order given."""
    left: dict[int, BookingGroup | SingleFrameBatch] = {}
    for at, (group, outcome) in enumerate(zip(groups, outcomes, strict=True)):
        tokens = [token for token in group.tokens if outcome.declined.get(token) in why] if outcome.declined else []
        if tokens:
            left[at] = group.subset(tokens)
    return left


def merge_outcomes(first: BookingOutcome, then: BookingOutcome, why: Collection[DeclineReason]) -> BookingOutcome:
    """The outcome of a group of which what was declined for these reasons was tried again."""
    declined = {token: reason for token, reason in first.declined.items() if reason not in why}
    return BookingOutcome(
        booked=[*first.booked, *then.booked],
        already=[*first.already, *then.already],
        refused=[*then.refused, *first.refused],
        declined=declined | dict(then.declined),
        refusal=then.refusal or first.refusal,
    )


def record_outcomes(ledger: str, outcomes: Iterable[BookingOutcome]) -> None:
    """Count what came of a batch for the metrics."""
    booked = 0
    for outcome in outcomes:
        booked += len(outcome.booked)
        if outcome.refusal is not None:
            REFUSED.labels(ledger, outcome.refusal.table, outcome.refusal.resource).inc(len(outcome.refused))
        for why in outcome.declined.values():
            DECLINED.labels(ledger, why).inc()
    BOOKED.labels(ledger).inc(booked)
