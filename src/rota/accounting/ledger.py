"""The contract of both ledgers: bookings, outcomes and guarantees.

- All or nothing per frame: a frame is booked at all five levels and has a `proc` row, or neither.
- No level exceeds its limit (`rota.model.quota` defines limits), unless `force` is given.
- Groups are served in the given order; within a group the first tokens are booked and the rest refused.
- Frames in series (ADR 23) run one after the other, so they share one charge: that of the last, the carrier. The tokens
  of a group are carriers and single frames; the followers of a carrier, which precede it, are booked with it or not at
  all, and ask for nothing.
- Calls are idempotent. A booked token is reported as `already` and counted once. Releasing a released token changes
  nothing; booking it again is declined as `tombstoned`, at least until the fence of its show rises. After a lost reply,
  repeat the call.
- A refusal is data, not an error. `Unavailable` means that the outcome is unknown; `InvalidInput` means that the
  request was malformed and nothing happened.
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
from rota.model.token_ranges import TokenSpan, to_spans
from rota.model.units import CENTICORES_MAX, Centicores

BOOKED = metrics.counter("rota_accounting_booked", "Frames booked.", labels=("ledger",))
REFUSED = metrics.counter(
    "rota_accounting_limit_exceeded", "Frames refused by a limit.", labels=("ledger", "table", "resource")
)
DECLINED = metrics.counter(
    "rota_accounting_declined", "Frames not booked for another reason than a limit.", labels=("ledger", "reason")
)

TOKEN_END: Final = 2**53
"""Exclusive upper bound of tokens: every store and every JSON reader holds them exactly."""
BATCH_MAX: Final = 4096
GPUS_MAX: Final = 2**31 - 1


class DeclineReason(StrEnum):
    """Why a token was not inserted by this call, other than for a limit."""

    ALREADY = "already"
    DUPLICATE = "duplicate"
    TOMBSTONED = "tombstoned"
    STALE_FENCE = "stale_fence"
    UNSEEDED = "unseeded"
    REDIS_OFF = "redis_off"
    LOCKED = "locked"
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
    """The resources of one token and the keys that count them."""

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
        """The id that counts this charge at `level`; subscriptions are keyed by pool, points by department."""
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


class Followers(msgspec.Struct, frozen=True):
    """Frames of a series before its carrier, in the order they run. No other booking may ever have a token between the
    first of them and the carrier."""

    tokens: Sequence[int]
    """Ascending, below that of the carrier."""
    jobs: Sequence[JobId]
    layers: Sequence[LayerId]
    """The job and the layer of each frame."""


SeriesByCarrier = Mapping[int, Followers]
NO_SERIES: Final[SeriesByCarrier] = {}


class _SharedCharges(msgspec.Struct, frozen=True, kw_only=True):
    """Frames of which some are in series."""

    series: SeriesByCarrier = NO_SERIES
    """Of those of the tokens that are carriers."""

    def follower_tokens(self) -> Iterator[int]:
        return (token for followers in self.series.values() for token in followers.tokens)

    def series_of(self, tokens: Iterable[int]) -> SeriesByCarrier:
        """Of these carriers only."""
        return {token: self.series[token] for token in tokens if token in self.series} if self.series else NO_SERIES


class BookingGroup(_SharedCharges, frozen=True):
    """Frames with one charge on one host. A `range` of tokens is sent and stored as a range."""

    charge: Charge
    host: UUID
    tokens: Sequence[int]
    capped: bool = True
    """False when neither job nor layer had caps when the caller read them; it saves the live ledger a lookup. A cap set
    later raises the fence, so bookings made without it are refused."""

    def subset(self, tokens: Sequence[int]) -> BookingGroup:
        """The same group with only these tokens, in the given order, and their followers."""
        return BookingGroup(self.charge, self.host, tokens, self.capped, series=self.series_of(tokens))


class SingleFrameBatch(_SharedCharges, frozen=True):
    """Single frames that differ only in job and layer; equivalent to one uncapped group per frame.

    Most jobs have one frame. As columns they cost a tenth of what they cost as groups.
    """

    charge: Charge
    """The resources of each frame; its job and layer are unused."""
    host: UUID
    tokens: Sequence[int]
    jobs: Sequence[JobId]
    layers: Sequence[LayerId]
    capped: ClassVar[bool] = False

    def subset(self, tokens: Sequence[int]) -> SingleFrameBatch:
        series = self.series_of(tokens)
        if tokens == self.tokens[: len(tokens)]:
            n = len(tokens)
            return SingleFrameBatch(self.charge, self.host, tokens, self.jobs[:n], self.layers[:n], series=series)
        index = {token: position for position, token in enumerate(self.tokens)}
        positions = [index[token] for token in tokens]
        jobs, layers = [self.jobs[at] for at in positions], [self.layers[at] for at in positions]
        return SingleFrameBatch(self.charge, self.host, tokens, jobs, layers, series=series)

    def groups(self) -> list[BookingGroup]:
        charge = self.charge
        return [
            BookingGroup(
                Charge(charge.alloc, charge.folder, job, layer, charge.dept, charge.cores, charge.gpus),
                self.host,
                (token,),
                capped=False,
                series=self.series_of((token,)),
            )
            for token, job, layer in zip(self.tokens, self.jobs, self.layers, strict=True)
        ]


BookingBatch = Sequence[BookingGroup | SingleFrameBatch]
NIL_UUID: Final = UUID(int=0)
"""Placeholder: the host of a release, and the job and layer of a single-frame batch's charge."""


class BookingOutcome(msgspec.Struct, frozen=True):
    """The result for one group. Each of its tokens is in exactly one of the four collections.

    Followers are booked if their carrier is, except those that are `declined`.
    """

    booked: Sequence[int] = ()
    already: Sequence[int] = ()
    refused: Sequence[int] = ()
    declined: Mapping[int, DeclineReason] = {}
    refusal: Refusal | None = None
    """The limit that refused the first of `refused`."""

    @property
    def all_booked(self) -> list[int]:
        """Tokens that are booked, by this call or an earlier one."""
        return [*self.booked, *self.already]

    def with_rows(self, tokens: Collection[int]) -> BookingOutcome:
        """The same, after these tokens were found to have rows."""
        refused = [token for token in self.refused if token not in tokens]
        return BookingOutcome(
            self.booked,
            [*self.already, *(token for token in (*self.refused, *self.declined) if token in tokens)],
            refused,
            {token: why for token, why in self.declined.items() if token not in tokens},
            self.refusal if refused else None,
        )


class ReleasedTokens(msgspec.Struct, frozen=True):
    """Tokens of one charge that this call released."""

    charge: Charge
    tokens: Sequence[int]


QuotaKey = tuple[Level, UUID]


class Ledger(Protocol):
    """One show per call; the module docstring states the guarantees."""

    async def book(self, show: ShowId, groups: BookingBatch, *, force: bool = False) -> list[BookingOutcome]:
        """Return one outcome per group or batch, in order. `force` skips the limits."""
        ...

    async def release(self, show: ShowId, tokens: Iterable[int]) -> list[ReleasedTokens]:
        """Release these tokens; tokens that are not booked are missing from the result."""
        ...

    async def counters(self, show: ShowId) -> dict[QuotaKey, Usage]:
        """Usage by key of the show; keys at 0 may be missing."""
        ...


def expand_single_frames(groups: BookingBatch) -> list[BookingGroup]:
    """Replace each single-frame batch by one group per frame."""
    return [each for group in groups for each in ([group] if isinstance(group, BookingGroup) else group.groups())]


def collapse_outcomes(groups: BookingBatch, outcomes: Sequence[BookingOutcome]) -> list[BookingOutcome]:
    """Merge the outcomes of expanded groups into one outcome per original group or batch.

    A frame of a single-frame batch that a cap of its job or layer refuses is declined as `capped`: a batch has one
    refusal, so it cannot name the cap of each frame.
    """
    remaining = iter(outcomes)
    return [
        next(remaining) if isinstance(group, BookingGroup) else _sum_outcomes([next(remaining) for _ in group.tokens])
        for group in groups
    ]


def _sum_outcomes(outcomes: Sequence[BookingOutcome]) -> BookingOutcome:
    refused: list[BookingOutcome] = []
    own_cap_refused: list[BookingOutcome] = []
    for each in outcomes:
        if each.refusal is not None:
            (own_cap_refused if each.refusal.table in (Level.JOB, Level.LAYER) else refused).append(each)
    declined = {token: why for each in outcomes for token, why in each.declined.items()}
    return BookingOutcome(
        booked=[token for each in outcomes for token in each.booked],
        already=[token for each in outcomes for token in each.already],
        refused=[token for each in refused for token in each.refused],
        declined=declined | {token: DeclineReason.CAPPED for each in own_cap_refused for token in each.refused},
        refusal=refused[0].refusal if refused else None,
    )


def check_booking(groups: BookingBatch) -> None:
    """Reject malformed requests before anything is sent."""
    for group in groups:
        _check_charge(group.charge)
        if isinstance(group, SingleFrameBatch) and not len(group.tokens) == len(group.jobs) == len(group.layers):
            raise InvalidInput("A single-frame batch needs one job and layer per token: give columns of equal length.")
    spans = sorted(
        span
        for group in groups
        for tokens in (group.tokens, *(each.tokens for each in group.series.values()))
        for span in to_spans(tokens)
    )
    if sum(last - first + 1 for first, last in spans) > BATCH_MAX:
        raise InvalidInput(f"A batch holds at most {BATCH_MAX} frames: book them in several calls.")
    check_tokens(spans)
    for (_, last), (first, _) in pairwise(spans):
        if first <= last:
            raise InvalidInput(f"Token {first} occurs twice in one batch: use one token per attempt of a frame.")


def check_tokens(spans: Sequence[TokenSpan]) -> None:
    """Reject sorted spans that leave the valid range of tokens."""
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
    groups: BookingBatch, outcomes: Sequence[BookingOutcome], reasons: Collection[DeclineReason]
) -> dict[int, BookingGroup | SingleFrameBatch]:
    """The tokens declined for one of these reasons, by the index of their group, in the given order."""
    retryable: dict[int, BookingGroup | SingleFrameBatch] = {}
    for index, (group, outcome) in enumerate(zip(groups, outcomes, strict=True)):
        tokens = [token for token in group.tokens if outcome.declined.get(token) in reasons] if outcome.declined else []
        if tokens:
            retryable[index] = group.subset(tokens)
    return retryable


def merge_outcomes(first: BookingOutcome, then: BookingOutcome, reasons: Collection[DeclineReason]) -> BookingOutcome:
    """Merge the outcome of a group with that of the retry of its tokens declined for these reasons."""
    declined = {token: reason for token, reason in first.declined.items() if reason not in reasons}
    return BookingOutcome(
        booked=[*first.booked, *then.booked],
        already=[*first.already, *then.already],
        refused=[*then.refused, *first.refused],
        declined=declined | dict(then.declined),
        refusal=then.refusal or first.refusal,
    )


def record_outcomes(ledger: str, outcomes: Iterable[BookingOutcome]) -> None:
    """Count the outcomes of a batch in the metrics."""
    booked = 0
    for outcome in outcomes:
        booked += len(outcome.booked)
        if outcome.refusal is not None:
            REFUSED.labels(ledger, outcome.refusal.table, outcome.refusal.resource).inc(len(outcome.refused))
        for why in outcome.declined.values():
            DECLINED.labels(ledger, why).inc()
    BOOKED.labels(ledger).inc(booked)
