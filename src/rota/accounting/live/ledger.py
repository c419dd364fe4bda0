"""The live ledger: a `Ledger` for managed shows. Counters and tokens in Redis first, rows of `proc` second.

Failures between the two, and their repair:
- a crash or a lost reply after the script leaves a token without a row. Repeating the call with the token continues
  there; otherwise the reconciliation tombstones it;
- the insert is refused because the fence rose or the token is tombstoned: the token is released again, if it is still
  the one booked under that fence; tokens refused for the fence are retried once Redis has the new fence;
- a token was booked under an earlier fence: limits may have been lowered since, so it is not inserted under the new
  one. PostgreSQL knows whether it has a row; if not it is released and decided again (A1);
- PostgreSQL answers that it cannot insert now (a lock timeout, a deadlock, a full disk): nothing was inserted, so what
  this call booked is released again, and the caller fails;
- the reply of the insert is lost: the insert is neither repeated here nor treated as refused. The caller repeats the
  call with the same tokens, and PostgreSQL reports which of them have rows;
- Redis is empty, damaged or rolled back: the script reports it and writes nothing. PostgreSQL still reports which
  tokens have rows, so a caller that lost a reply gets the true outcome.
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
from rota.accounting.live.release_publisher import RedisReleasePublisher, TokensReleasedReply
from rota.accounting.resources import QuotaChange
from rota.infra import failpoints
from rota.infra.postgres import Database
from rota.infra.redis import RedisKeys, script
from rota.model.errors import PostgresBusy, PostgresUnavailable
from rota.model.ids import ShowId
from rota.model.quota import LEVELS, RESOURCES, Level, Refusal, Resource, Usage

log = structlog.get_logger(__name__)

NO_FENCE: Final = 0
"""No show has this fence: PostgreSQL inserts nothing under it, and only reports existing rows."""
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
    """The script's reply for one group: how many of its absent tokens it booked, and the limit that refuses the
    next."""

    fit: int
    level: int
    resource: int
    current: int
    cap: int
    already: list[int]
    otherwise: list[int]
    before: list[int]
    """Pairs of a token booked under an earlier fence and that fence."""

    @property
    def earlier_fences(self) -> dict[int, int]:
        return dict(zip(self.before[::2], self.before[1::2], strict=True))

    @property
    def unknown_level(self) -> Level | None:
        """The level that is unknown to Redis."""
        return LEVELS[self.level - 1] if self.level and not self.resource else None


class ExpandRequiredReply(msgspec.Struct, frozen=True, tag="apart"):
    """Nothing was done: the frames of a single-frame batch must be decided one by one."""


class BookDamagedReply(msgspec.Struct, frozen=True, tag="damaged"):
    where: str


BOOK = script(__package__, "book", replies=BookedReply | ExpandRequiredReply | UnseededReply | BookDamagedReply)


class LiveLedger:
    """`unseeded` is called with each managed show that Redis must be seeded for."""

    def __init__(
        self, database: Database, client: Redis, keys: RedisKeys, unseeded: Callable[[ShowId], None] | None = None
    ) -> None:
        self.database = database
        self.client = client
        self.keys = keys
        self.limits = LimitsPublisher(database, client, keys)
        self.publisher = RedisReleasePublisher(client, keys)
        self._unseeded = unseeded
        self._sync_locks: dict[ShowId, asyncio.Lock] = {}

    async def book(self, show: ShowId, groups: BookingBatch, *, force: bool = False) -> list[BookingOutcome]:
        check_booking(groups)
        outcomes = await self._attempt(show, groups, force=force)
        for _ in range(FENCE_RETRIES_MAX):
            stale = retryable_groups(groups, outcomes, _RETRYABLE_REASONS)
            if not stale:
                break
            await self.sync_limits(show)
            again = await self._attempt(show, list(stale.values()), force=force)
            for index, outcome in zip(stale, again, strict=True):
                outcomes[index] = merge_outcomes(outcomes[index], outcome, _RETRYABLE_REASONS)
        record_outcomes("live", outcomes)
        return outcomes

    async def release(self, show: ShowId, tokens: Iterable[int]) -> list[ReleasedTokens]:
        deleted = await allocations.delete(self.database, show, tokens)
        await self.publisher.publish(show, deleted)
        return list(deleted.released)

    async def counters(self, show: ShowId) -> dict[QuotaKey, Usage]:
        """From the counter hashes; jobs and layers without limits have none and are summed from their tokens."""
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
        """Push a committed change of limits, or a fence `raised` without one, to Redis."""
        reply = await self.limits.push(show, change, raised=raised)
        if isinstance(reply, UncountedReply):
            await reconcile.reconcile_show(self, show, release_orphans=False)
        if isinstance(reply, MissedChangeReply | UncountedReply):
            await self.sync_limits(show)

    async def sync_limits(self, show: ShowId) -> bool:
        """Sync all limits and the fence with PostgreSQL; False when the show must be seeded first.

        Serialized per show in this process; waits for a reconciliation of another process instead of starting one,
        because each would supersede the other.
        """
        async with self._sync_locks.setdefault(show, asyncio.Lock()):
            for _ in range(SYNC_ATTEMPTS_MAX):
                match await self.limits.reseed(show):
                    case LimitsWrittenReply() | NewerLimitsReply():
                        return True
                    case UncountedReply():
                        if not await self._wait_for_other_reconcile(show):
                            await reconcile.reconcile_show(self, show, release_orphans=False)
                    case UnseededReply() | MissedChangeReply():
                        return False
        return False

    async def _wait_for_other_reconcile(self, show: ShowId) -> bool:
        """Wait for a reconciliation in progress; gives up after a while, since it may have died or pause a lot."""
        keys = self.keys.show_keys(str(show))
        for poll in range(RECONCILE_POLLS_MAX):
            [found] = await live_reader.show_states(self.client, [keys])
            if not found.recounting:
                return poll > 0
            await asyncio.sleep(RECONCILE_POLL_INTERVAL_S)
        return False

    async def adopt(self, show: ShowId, groups: Sequence[BookingGroup], *, under: int) -> int | None:
        """Count tokens that already have rows, regardless of limits; returns how many were missing, None when Redis
        rejects them.

        An uncapped group is counted at the three shared levels: neither its job nor its layer may have limits in Redis.
        """
        must_know = [0 if group.capped else None for group in groups]
        reply = await self._call_script(show, groups, must_know, ask="all", under=under)
        return sum(group.fit for group in reply.groups) if isinstance(reply, BookedReply) else None

    async def release_tombstoned(self, show: ShowId, fence: int, tokens: Iterable[int]) -> int:
        """Release tokens that are tombstoned under `fence`; returns how many Redis held. The charges come from Redis,
        so the caller need not know them."""
        keys = self.keys.show_keys(str(show))
        held = await live_reader.charge_numbers(self.client, keys, tokens)
        by_number: dict[str, list[int]] = {}
        for token, number in held.items():
            by_number.setdefault(number, []).append(token)
        charges = await live_reader.read_charges(self.client, keys, by_number)
        groups = [BookingGroup(charge, NIL_UUID, by_number[number]) for number, charge in charges.items()]
        released = 0
        for chunk in live_reader.chunked(groups, GROUPS_PER_CALL):
            reply = await self.publisher.release(show, fence, chunk)
            released += reply.tokens if isinstance(reply, TokensReleasedReply) else 0
        return released

    async def _attempt(self, show: ShowId, groups: BookingBatch, *, force: bool) -> list[BookingOutcome]:
        booked = await self._book(show, groups, "force" if force else "limits")
        if isinstance(booked, ExpandRequiredReply):
            return collapse_outcomes(groups, await self._attempt(show, expand_single_frames(groups), force=force))
        if booked is None:
            return await outcomes_from_rows(self.database, show, groups, DeclineReason.UNSEEDED)
        held = [_booked_tokens(group, reply) for group, reply in zip(groups, booked.groups, strict=True)]
        rows = [group.subset(tokens) for group, tokens in zip(groups, held, strict=True) if tokens]
        failpoints.hit("live.after_script")
        try:
            inserted = (
                await allocations.insert(self.database, show, booked.fence, rows)
                if rows
                else allocations.ProcInsertResult()
            )
        except PostgresUnavailable as error:
            if isinstance(error, PostgresBusy) or error.facts.get("outcome", "unknown") != "unknown":
                await self._rollback_new_bookings(show, booked, groups, held)
            raise
        if inserted.refused:
            await self._rollback_bookings(show, booked.fence, rows, inserted.refused)
        if any(reply.before for reply in booked.groups):
            older = await self._resolve_earlier_bookings(show, groups, booked.groups)
            held = [[*tokens, *reply.earlier_fences] for tokens, reply in zip(held, booked.groups, strict=True)]
            inserted = allocations.ProcInsertResult(
                [*inserted.already, *older.already], inserted.refused | older.refused
            )
        return [_outcome(*each, inserted) for each in zip(groups, booked.groups, held, strict=True)]

    async def _resolve_earlier_bookings(
        self, show: ShowId, groups: BookingBatch, replies: Sequence[GroupReply]
    ) -> allocations.ProcInsertResult:
        """Resolve tokens booked under an earlier fence: they have a row, or never get one from that booking. Limits may
        have been lowered since, so tokens without a row are released and decided again."""
        older = {token: fence for each in replies for token, fence in each.earlier_fences.items()}
        rows = [
            group.subset(list(each.earlier_fences)) for group, each in zip(groups, replies, strict=True) if each.before
        ]
        found = await allocations.insert(self.database, show, NO_FENCE, rows)
        for fence in set(older.values()):
            refused = {token: why for token, why in found.refused.items() if older.get(token) == fence}
            await self._rollback_bookings(show, fence, rows, refused)
        return found

    async def _book(self, show: ShowId, groups: BookingBatch, ask: str) -> BookedReply | ExpandRequiredReply | None:
        """The decision of the script, once Redis has every limit; None when the show is not seeded."""
        must_know = [3 if group.capped else None for group in groups]
        for lookups_left in reversed(range(LIMIT_LOOKUPS_MAX + 1)):
            reply = await self._call_script(show, groups, must_know, ask=ask, skip=not lookups_left)
            failpoints.after_send("live.book")
            if isinstance(reply, ExpandRequiredReply):
                return reply
            if not isinstance(reply, BookedReply):
                return None
            unknown = [index for index, group_reply in enumerate(reply.groups) if group_reply.unknown_level]
            if not unknown or not lookups_left:
                return reply
            known, pushed = await self.limits.push_missing(
                show, {name for index in unknown for name in _counter_names(groups[index])}
            )
            if isinstance(pushed, MissedChangeReply | UncountedReply):
                await self.sync_limits(show)
            for index in unknown:
                must_know[index] = _required_limits(groups[index], known)
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
        packed = script_args.pack_arguments(keys, groups, must_know)
        reply = await BOOK(
            self.client,
            seq=keys.seq,
            show=keys.show,
            index=keys.limits,
            charges=keys.charges,
            buckets=keys.buckets,
            shadow=keys.shadow,
            places=packed.places,
            show_id=str(show),
            ask=ask,
            skip=skip,
            under=under,
            asked=packed.packed,
        )
        if isinstance(reply, BookDamagedReply):
            log.warning("ledger_damaged", show=str(show), key=reply.where, remedy="the show is seeded again")
        if isinstance(reply, UnseededReply | BookDamagedReply) and not under and self._unseeded:
            self._unseeded(show)
        return reply

    async def _rollback_new_bookings(
        self, show: ShowId, booked: BookedReply, groups: BookingBatch, held: Sequence[Sequence[int]]
    ) -> None:
        """PostgreSQL answered that it inserted nothing: release what this call booked. Tokens of an earlier call may
        have rows and stay."""
        new = [
            group.subset([token for token in tokens if token not in set(reply.already)])
            for group, tokens, reply in zip(groups, held, booked.groups, strict=True)
        ]
        await self.publisher.rollback_bookings(show, booked.fence, [group for group in new if group.tokens])

    async def _rollback_bookings(
        self, show: ShowId, fence: int, rows: BookingBatch, refused: Mapping[int, DeclineReason]
    ) -> None:
        """Release the tokens that PostgreSQL refused. A duplicate stays: its token may belong to the other's row."""
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
    """Outcomes while Redis cannot decide, because of `why`: PostgreSQL reports tokens with rows from earlier calls."""
    check_booking(groups)
    found = await allocations.insert(database, show, NO_FENCE, groups)
    refused = {token: why if each is DeclineReason.STALE_FENCE else each for token, each in found.refused.items()}
    already = set(found.already)
    return [
        BookingOutcome(
            already=[token for token in group.tokens if token in already],
            declined={token: refused[token] for token in (*group.tokens, *group.follower_tokens()) if token in refused},
        )
        for group in groups
    ]


def _counter_names(group: BookingGroup | SingleFrameBatch) -> list[str]:
    """Names of all its limits; a single-frame batch has only the limits its frames share."""
    levels = LEVELS if isinstance(group, BookingGroup) else SHARED_LEVELS
    return [script_args.counter_name(level, group.charge.key(level)) for level in levels]


def _required_limits(group: BookingGroup | SingleFrameBatch, known: set[str]) -> int | None:
    """Which of job and layer have limits in PostgreSQL, so that Redis must have them before it books."""
    if isinstance(group, SingleFrameBatch):
        return None
    return sum(
        bit
        for level, bit in _REQUIRED_BITS.items()
        if script_args.counter_name(level, group.charge.key(level)) in known
    )


def _booked_tokens(group: BookingGroup | SingleFrameBatch, reply: GroupReply) -> Sequence[int]:
    """Tokens that Redis holds under its fence, in the given order."""
    if not reply.already and not reply.otherwise and not reply.before:
        return group.tokens[: reply.fit]
    present = {*reply.already, *reply.otherwise, *reply.earlier_fences}
    absent = [token for token in group.tokens if token not in present]
    held = {*absent[: reply.fit], *reply.already}
    return [token for token in group.tokens if token in held]


def _outcome(
    group: BookingGroup | SingleFrameBatch,
    reply: GroupReply,
    held: Sequence[int],
    inserted: allocations.ProcInsertResult,
) -> BookingOutcome:
    if len(held) == len(group.tokens) and not inserted.already and not inserted.refused:
        return BookingOutcome(booked=held)
    held_tokens = set(held)
    already = [token for token in inserted.already if token in held_tokens]
    refusable = held_tokens.union(group.follower_tokens())
    declined = {token: why for token, why in inserted.refused.items() if token in refusable}
    declined |= dict.fromkeys(reply.otherwise, DeclineReason.DUPLICATE)
    not_inserted = {*already, *declined}
    booked = [token for token in held if token not in not_inserted] if not_inserted else held
    remaining = [token for token in group.tokens if token not in held_tokens and token not in declined]
    if not remaining:
        return BookingOutcome(booked, already, (), declined)
    if reply.unknown_level in _UNKNOWN_REASONS:
        return BookingOutcome(
            booked, already, (), declined | dict.fromkeys(remaining, _UNKNOWN_REASONS[reply.unknown_level])
        )
    if reply.unknown_level in _REQUIRED_BITS:
        return BookingOutcome(booked, already, (), declined | dict.fromkeys(remaining, DeclineReason.STALE_FENCE))
    return BookingOutcome(booked, already, remaining, declined, _refusal(group, reply))


def _refusal(group: BookingGroup | SingleFrameBatch, reply: GroupReply) -> Refusal:
    ask = group.charge.ask
    if reply.unknown_level is Level.SUBSCRIPTION:
        resource = Resource.CORES if ask.cores else Resource.GPUS
        return Refusal(Level.SUBSCRIPTION, resource, 0, 0, ask.of(resource))
    resource = RESOURCES[reply.resource - 1]
    return Refusal(LEVELS[reply.level - 1], resource, reply.current, reply.cap, ask.of(resource))
