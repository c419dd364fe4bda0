"""The live ledger: a `Ledger` for managed shows. Counters and tokens in Redis first, rows of `proc` second.

What may happen between the two, and who answers for it:
- we die, or a reply is lost, after the script: a token without a row. Calling again with the token goes on where it was
  left; if nobody does, the recount buries it;
- the insert is refused, because the fence rose or the token is buried: the token is released again, if it is still
  the one booked under that fence, and what was refused for the fence is tried once more when Redis has the new one;
- a token is found that was booked under an earlier fence: limits may have been lowered since, so it is not inserted
  under the new one. PostgreSQL tells whether it has a row; if not it is given back and decided anew (A1);
- the reply of the insert is lost: it is not sent again from here, and not taken for refused either. The caller calls
  again with the same tokens, and PostgreSQL tells which of them have rows;
- Redis is empty, damaged or older than it was: the script says so and writes nothing. PostgreSQL still tells which
  tokens have rows, so that a caller who lost a reply is not told a lie.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec
import structlog
from redis.asyncio import Redis

from rota.accounting import allocations
from rota.accounting.ledger import (
    NIL_UUID,
    BookingBatch,
    BookingGroup,
    BookingOutcome,
    DeclineReason,
    QuotaKey,
    ReleasedTokens,
    SingleFrameBatch,
    check_booking,
    collapse_outcomes,
    expand_single_frames,
    merge_outcomes,
    record_outcomes,
    retryable_groups,
)
from rota.accounting.live import reader as live_reader
from rota.accounting.live import reconcile, script_args
from rota.accounting.live.limits import (
    LimitsPublisher,
    LimitsWrittenReply,
    MissedChangeReply,
    NewerLimitsReply,
    UncountedReply,
    UnseededReply,
)
from rota.accounting.live.release_publisher import RedisReleasePublisher
from rota.accounting.live.release_publisher import TokensReleasedReply as Forgotten
from rota.accounting.resources import QuotaChange
from rota.infra import failpoints
from rota.infra.postgres import Database
from rota.infra.redis import RedisKeys, script
from rota.model.ids import ShowId
from rota.model.quota import LEVELS, RESOURCES, Level, Refusal, Resource, Usage

log = structlog.get_logger(__name__)

NO_FENCE: Final = 0
"""No show has it: PostgreSQL inserts nothing under it, and tells what is there."""
LIMIT_LOOKUPS_MAX: Final = 2
FENCE_RETRIES_MAX: Final = 2
GROUPS_PER_CALL: Final = 8
SYNC_ATTEMPTS_MAX: Final = 5
RECONCILE_POLLS_MAX: Final = 20
RECONCILE_POLL_INTERVAL_S: Final = 0.05
_RETRYABLE_REASONS: Final = frozenset({DeclineReason.STALE_FENCE})
"""Redis has an older fence than PostgreSQL."""
_UNKNOWN_REASONS: Final = {Level.FOLDER: DeclineReason.UNKNOWN_FOLDER, Level.POINT: DeclineReason.UNKNOWN_DEPT}
SHARED_LEVELS: Final = (Level.SUBSCRIPTION, Level.FOLDER, Level.POINT)
_REQUIRED_BITS: Final = {Level.JOB: 1, Level.LAYER: 2}


class BookedReply(msgspec.Struct, frozen=True, tag="booked"):
    fence: int
    seq: int
    groups: tuple[GroupReply, ...]


class GroupReply(msgspec.Struct, frozen=True, array_like=True):
    """What Redis said of one group: how many of its absent tokens are booked now, what refuses the next, and so on."""

    fit: int
    level: int
    resource: int
    current: int
    cap: int
    already: list[int]
    otherwise: list[int]
    before: list[int]
    """Tokens that were booked under an earlier fence, each followed by it."""

    @property
    def earlier_fences(self) -> dict[int, int]:
        return dict(zip(self.before[::2], self.before[1::2], strict=True))

    @property
    def unknown_level(self) -> Level | None:
        """The level Redis knows nothing of."""
        return LEVELS[self.level - 1] if self.level and not self.resource else None


class ExpandRequiredReply(msgspec.Struct, frozen=True, tag="apart"):
    """Nothing was done: a swarm holds what cannot be decided for all of it at once."""


class BookDamagedReply(msgspec.Struct, frozen=True, tag="damaged"):
    where: str


BOOK = script(__package__, "book", replies=BookedReply | ExpandRequiredReply | UnseededReply | BookDamagedReply)


class LiveLedger:
    """`unseeded` is called with a show that Redis must be seeded for, by whoever sees to that."""

    def __init__(
        self, database: Database, client: Redis, keys: RedisKeys, unseeded: Callable[[ShowId], None] | None = None
    ) -> None:
        self.database = database
        self.client = client
        self.keys = keys
        self.limits = LimitsPublisher(database, client, keys)
        self.publisher = RedisReleasePublisher(client, keys)
        self._unseeded = unseeded
        self._catching_up: dict[ShowId, asyncio.Lock] = {}

    async def book(self, show: ShowId, groups: BookingBatch, *, force: bool = False) -> list[BookingOutcome]:
        check_booking(groups)
        outcomes = await self._attempt(show, groups, force=force)
        for _ in range(FENCE_RETRIES_MAX):
            behind = retryable_groups(groups, outcomes, _RETRYABLE_REASONS)
            if not behind:
                break
            await self.sync_limits(show)
            again = await self._attempt(show, list(behind.values()), force=force)
            for at, outcome in zip(behind, again, strict=True):
                outcomes[at] = merge_outcomes(outcomes[at], outcome, _RETRYABLE_REASONS)
        record_outcomes("live", outcomes)
        return outcomes

    async def release(self, show: ShowId, tokens: Iterable[int]) -> list[ReleasedTokens]:
        deleted = await allocations.delete(self.database, show, tokens)
        await self.publisher.publish(show, deleted)
        return list(deleted.released)

    async def counters(self, show: ShowId) -> dict[QuotaKey, Usage]:
        """As the hashes have it; jobs and layers without one, because they have no limits, by their tokens."""
        keys = self.keys.show_keys(str(show))
        by_tokens = await live_reader.usage_by_name(self.client, keys)
        found = await live_reader.read_counters(self.client, keys, await live_reader.names_in_use(self.client, keys))
        counted = {name: each.usage for name, each in found.items() if each.usage is not None and each.fields}
        return {script_args.parse_counter_name(name): usage for name, usage in (by_tokens | counted).items()}

    async def is_seeded(self, show: ShowId, fence: int) -> bool:
        """Whether Redis books the show under this fence."""
        [found] = await live_reader.show_states(self.client, [self.keys.show_keys(str(show))])
        return found.fence == fence

    async def push_change(self, show: ShowId, change: QuotaChange | None = None, *, raised: int = 0) -> None:
        """Bring a change of limits, or a fence that was `raised` without one, to Redis, after its commit."""
        reply = await self.limits.push(show, change, raised=raised)
        if isinstance(reply, UncountedReply):
            await reconcile.reconcile_show(self, show, bury=False)
        if isinstance(reply, MissedChangeReply | UncountedReply):
            await self.sync_limits(show)

    async def sync_limits(self, show: ShowId) -> bool:
        """Bring all limits, and the fence, to where PostgreSQL has them; False when the show must be seeded first.

        One at a time in this process, and beside a recount of another nobody begins one: each would end the other's.
        """
        async with self._catching_up.setdefault(show, asyncio.Lock()):
            for _ in range(SYNC_ATTEMPTS_MAX):
                match await self.limits.reseed(show):
                    case LimitsWrittenReply() | NewerLimitsReply():
                        return True
                    case UncountedReply():
                        if not await self._wait_for_other_reconcile(show):
                            await reconcile.reconcile_show(self, show, bury=False)
                    case UnseededReply() | MissedChangeReply():
                        return False
        return False

    async def _wait_for_other_reconcile(self, show: ShowId) -> bool:
        """Wait for a recount that is under way, unless it takes too long: then it died, or rests a lot."""
        keys = self.keys.show_keys(str(show))
        for turn in range(RECONCILE_POLLS_MAX):
            [found] = await live_reader.show_states(self.client, [keys])
            if not found.recounting:
                return turn > 0
            await asyncio.sleep(RECONCILE_POLL_INTERVAL_S)
        return False

    async def adopt(self, show: ShowId, groups: Sequence[BookingGroup], *, under: int) -> int | None:
        """Count what has rows already, whatever the limits say; how many tokens were not there, None when Redis does
        not take them now.

        A group that is not `capped` is counted at the three shared levels: neither its job nor its layer may have
        limits in Redis.
        """
        must_know = [0 if group.capped else None for group in groups]
        reply = await self._call_script(show, groups, must_know, ask="all", under=under)
        return sum(told.fit for told in reply.groups) if isinstance(reply, BookedReply) else None

    async def release_tombstoned(self, show: ShowId, fence: int, tokens: Iterable[int]) -> int:
        """Take tokens out of Redis that lie in a grave under `fence`; how many were there. Redis tells what they held,
        for whoever never knew it, or has lost the reply that told."""
        keys = self.keys.show_keys(str(show))
        held = await live_reader.charge_numbers(self.client, keys, tokens)
        by_number: dict[str, list[int]] = {}
        for token, number in held.items():
            by_number.setdefault(number, []).append(token)
        charges = await live_reader.read_charges(self.client, keys, by_number)
        groups = [BookingGroup(charge, NIL_UUID, by_number[number]) for number, charge in charges.items()]
        forgotten = 0
        for piece in live_reader.chunked(groups, GROUPS_PER_CALL):
            reply = await self.publisher.release(show, fence, piece)
            forgotten += reply.tokens if isinstance(reply, Forgotten) else 0
        return forgotten

    async def _attempt(self, show: ShowId, groups: BookingBatch, *, force: bool) -> list[BookingOutcome]:
        booked = await self._book(show, groups, "force" if force else "limits")
        if isinstance(booked, ExpandRequiredReply):
            return collapse_outcomes(groups, await self._attempt(show, expand_single_frames(groups), force=force))
        if booked is None:
            return await outcomes_from_rows(self.database, show, groups, DeclineReason.UNSEEDED)
        held = [_booked_tokens(group, told) for group, told in zip(groups, booked.groups, strict=True)]
        rows = [group.subset(tokens) for group, tokens in zip(groups, held, strict=True) if tokens]
        failpoints.hit("live.after_script")
        inserted = (
            await allocations.insert(self.database, show, booked.fence, rows)
            if rows
            else allocations.ProcInsertResult()
        )
        if inserted.refused:
            await self._rollback_bookings(show, booked.fence, rows, inserted.refused)
        if any(told.before for told in booked.groups):
            older = await self._resolve_earlier_bookings(show, groups, booked.groups)
            held = [[*tokens, *told.earlier_fences] for tokens, told in zip(held, booked.groups, strict=True)]
            inserted = allocations.ProcInsertResult(
                [*inserted.already, *older.already], inserted.refused | older.refused
            )
        return [_outcome(*each, inserted) for each in zip(groups, booked.groups, held, strict=True)]

    async def _resolve_earlier_bookings(
        self, show: ShowId, groups: BookingBatch, told: Sequence[GroupReply]
    ) -> allocations.ProcInsertResult:
        """What became of tokens that Redis holds since an earlier fence: they have a row, or never get one by that
        booking. Limits may have been lowered since, so those without a row are given back, to be decided anew."""
        older = {token: fence for each in told for token, fence in each.earlier_fences.items()}
        rows = [
            group.subset(list(each.earlier_fences)) for group, each in zip(groups, told, strict=True) if each.before
        ]
        found = await allocations.insert(self.database, show, NO_FENCE, rows)
        for fence in set(older.values()):
            refused = {token: why for token, why in found.refused.items() if older[token] == fence}
            await self._rollback_bookings(show, fence, rows, refused)
        return found

    async def _book(self, show: ShowId, groups: BookingBatch, ask: str) -> BookedReply | ExpandRequiredReply | None:
        """What the script decided, once it knows every limit there is; None when the show is not seeded."""
        must_know = [3 if group.capped else None for group in groups]
        for left in reversed(range(LIMIT_LOOKUPS_MAX + 1)):
            reply = await self._call_script(show, groups, must_know, ask=ask, skip=not left)
            failpoints.after_send("live.book")
            if isinstance(reply, ExpandRequiredReply):
                return reply
            if not isinstance(reply, BookedReply):
                return None
            unknown = [at for at, told in enumerate(reply.groups) if told.unknown_level]
            if not unknown or not left:
                return reply
            there, told = await self.limits.push_missing(
                show, {name for at in unknown for name in _counter_names(groups[at])}
            )
            if isinstance(told, MissedChangeReply | UncountedReply):
                await self.sync_limits(show)
            for at in unknown:
                must_know[at] = _required_limits(groups[at], there)
        raise AssertionError("unreachable: the last round returns")

    async def _call_script(
        self,
        show: ShowId,
        groups: BookingBatch,
        must_know: Sequence[int | None],
        *,
        ask: str,
        skip: bool = True,
        under: int = 0,
    ) -> BookedReply | ExpandRequiredReply | UnseededReply | BookDamagedReply:
        keys = self.keys.show_keys(str(show))
        wired = script_args.pack_arguments(keys, groups, must_know)
        reply = await BOOK(
            self.client,
            seq=keys.seq,
            show=keys.show,
            index=keys.limits,
            charges=keys.charges,
            buckets=keys.buckets,
            shadow=keys.shadow,
            places=wired.places,
            show_id=str(show),
            ask=ask,
            skip=skip,
            under=under,
            asked=wired.packed,
        )
        if isinstance(reply, BookDamagedReply):
            log.warning("books_damaged", show=str(show), key=reply.where, remedy="the show is seeded anew")
        if isinstance(reply, UnseededReply | BookDamagedReply) and not under and self._unseeded:
            self._unseeded(show)
        return reply

    async def _rollback_bookings(
        self, show: ShowId, fence: int, rows: BookingBatch, refused: Mapping[int, DeclineReason]
    ) -> None:
        """What PostgreSQL refused is not booked. A duplicate stays: its token may stand for the other's row."""
        groups = [
            group.subset(tokens)
            for group in rows
            if (
                tokens := [
                    token
                    for token in group.tokens
                    if refused.get(token, DeclineReason.DUPLICATE) is not DeclineReason.DUPLICATE
                ]
            )
        ]
        failpoints.hit("live.before_give_back")
        if groups:
            await self.publisher.rollback_bookings(show, fence, groups)


async def outcomes_from_rows(
    database: Database, show: ShowId, groups: BookingBatch, why: DeclineReason
) -> list[BookingOutcome]:
    """Redis decides nothing now, because of `why`; PostgreSQL tells which tokens have rows from an earlier call."""
    check_booking(groups)
    found = await allocations.insert(database, show, NO_FENCE, groups)
    refused = {token: why if each is DeclineReason.STALE_FENCE else each for token, each in found.refused.items()}
    already = set(found.already)
    return [
        BookingOutcome(
            already=[token for token in group.tokens if token in already],
            declined={token: refused[token] for token in group.tokens if token in refused},
        )
        for group in groups
    ]


def _counter_names(group: BookingGroup | SingleFrameBatch) -> list[str]:
    """Of all that limits it; a swarm is limited by what its frames share."""
    levels = LEVELS if isinstance(group, BookingGroup) else SHARED_LEVELS
    return [script_args.counter_name(level, group.charge.key(level)) for level in levels]


def _required_limits(group: BookingGroup | SingleFrameBatch, there: set[str]) -> int | None:
    """Which of job and layer have limits in PostgreSQL, so that Redis must have them before it books."""
    if isinstance(group, SingleFrameBatch):
        return None
    return sum(
        bit
        for level, bit in _REQUIRED_BITS.items()
        if script_args.counter_name(level, group.charge.key(level)) in there
    )


def _booked_tokens(group: BookingGroup | SingleFrameBatch, told: GroupReply) -> Sequence[int]:
    """Tokens that Redis holds under its fence, in the order given."""
    if not told.already and not told.otherwise and not told.before:
        return group.tokens[: told.fit]
    there = {*told.already, *told.otherwise, *told.earlier_fences}
    absent = [token for token in group.tokens if token not in there]
    held = {*absent[: told.fit], *told.already}
    return [token for token in group.tokens if token in held]


def _outcome(
    group: BookingGroup | SingleFrameBatch,
    told: GroupReply,
    held: Sequence[int],
    inserted: allocations.ProcInsertResult,
) -> BookingOutcome:
    if len(held) == len(group.tokens) and not inserted.already and not inserted.refused:
        return BookingOutcome(booked=held)
    mine = set(held)
    already = [token for token in inserted.already if token in mine]
    declined = {token: why for token, why in inserted.refused.items() if token in mine}
    declined |= dict.fromkeys(told.otherwise, DeclineReason.DUPLICATE)
    barred = {*already, *declined}
    booked = [token for token in held if token not in barred] if barred else held
    rest = [token for token in group.tokens if token not in mine and token not in declined]
    if not rest:
        return BookingOutcome(booked, already, (), declined)
    if told.unknown_level in _UNKNOWN_REASONS:
        return BookingOutcome(booked, already, (), declined | dict.fromkeys(rest, _UNKNOWN_REASONS[told.unknown_level]))
    if told.unknown_level in _REQUIRED_BITS:
        return BookingOutcome(booked, already, (), declined | dict.fromkeys(rest, DeclineReason.STALE_FENCE))
    return BookingOutcome(booked, already, rest, declined, _refusal(group, told))


def _refusal(group: BookingGroup | SingleFrameBatch, told: GroupReply) -> Refusal:
    ask = group.charge.ask
    if told.unknown_level is Level.SUBSCRIPTION:
        resource = Resource.CORES if ask.cores else Resource.GPUS
        return Refusal(Level.SUBSCRIPTION, resource, 0, 0, ask.of(resource))
    resource = RESOURCES[told.resource - 1]
    return Refusal(LEVELS[told.level - 1], resource, told.current, told.cap, ask.of(resource))
