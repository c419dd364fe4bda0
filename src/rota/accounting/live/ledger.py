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

from rota.accounting import procs
from rota.accounting.items import Change
from rota.accounting.ledger import (
    NOBODY,
    Batch,
    Group,
    Key,
    Outcome,
    Released,
    Swarm,
    Why,
    apart,
    check,
    count,
    merged,
    still_declined,
    together,
)
from rota.accounting.live import recount, state, wire
from rota.accounting.live.limits import Limits, Missed, Newer, Uncounted, Unseeded, Written
from rota.accounting.live.publisher import RedisPublisher
from rota.accounting.live.publisher import Released as Forgotten
from rota.infra import faults
from rota.infra.postgres import Database
from rota.infra.redis import Keys, script
from rota.model.ids import ShowId
from rota.model.quota import LEVELS, RESOURCES, Level, Refusal, Resource, Usage

log = structlog.get_logger(__name__)

NO_FENCE: Final = 0
"""No show has it: PostgreSQL inserts nothing under it, and tells what is there."""
TEACHINGS: Final = 2
RETRIES: Final = 2
GROUPS_PER_CALL: Final = 8
CATCHING_UP_MAX: Final = 5
OTHERS_TURNS: Final = 20
OTHERS_TURN_S: Final = 0.05
_BEHIND: Final = frozenset({Why.STALE_FENCE})
"""Redis has an older fence than PostgreSQL."""
_UNKNOWN: Final = {Level.FOLDER: Why.UNKNOWN_FOLDER, Level.POINT: Why.UNKNOWN_DEPT}
SHARED: Final = (Level.SUBSCRIPTION, Level.FOLDER, Level.POINT)
_MUST_KNOW: Final = {Level.JOB: 1, Level.LAYER: 2}


class Booked(msgspec.Struct, frozen=True):
    fence: int
    seq: int
    groups: tuple[Told, ...]


class Told(msgspec.Struct, frozen=True, array_like=True):
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
    def older(self) -> dict[int, int]:
        return dict(zip(self.before[::2], self.before[1::2], strict=True))

    @property
    def unknown(self) -> Level | None:
        """The level Redis knows nothing of."""
        return LEVELS[self.level - 1] if self.level and not self.resource else None


class Apart(msgspec.Struct, frozen=True):
    """Nothing was done: a swarm holds what cannot be decided for all of it at once."""


class Damaged(msgspec.Struct, frozen=True):
    where: str


BOOK = script(__package__, "book", replies=Booked | Apart | Unseeded | Damaged)


class LiveLedger:
    """`unseeded` is called with a show that Redis must be seeded for, by whoever sees to that."""

    def __init__(
        self, database: Database, client: Redis, keys: Keys, unseeded: Callable[[ShowId], None] | None = None
    ) -> None:
        self.database = database
        self.client = client
        self.keys = keys
        self.limits = Limits(database, client, keys)
        self.publisher = RedisPublisher(client, keys)
        self._unseeded = unseeded
        self._catching_up: dict[ShowId, asyncio.Lock] = {}

    async def book(self, show: ShowId, groups: Batch, *, force: bool = False) -> list[Outcome]:
        check(groups)
        outcomes = await self._attempt(show, groups, force=force)
        for _ in range(RETRIES):
            behind = still_declined(groups, outcomes, _BEHIND)
            if not behind:
                break
            await self.catch_up(show)
            again = await self._attempt(show, list(behind.values()), force=force)
            for at, outcome in zip(behind, again, strict=True):
                outcomes[at] = merged(outcomes[at], outcome, _BEHIND)
        count("live", outcomes)
        return outcomes

    async def release(self, show: ShowId, tokens: Iterable[int]) -> list[Released]:
        deleted = await procs.delete(self.database, show, tokens)
        await self.publisher.released(show, deleted)
        return list(deleted.released)

    async def counters(self, show: ShowId) -> dict[Key, Usage]:
        """As the hashes have it; jobs and layers without one, because they have no limits, by their tokens."""
        keys = self.keys.of_show(str(show))
        by_tokens = await state.held(self.client, keys)
        found = await state.counted(self.client, keys, await state.names_in_use(self.client, keys))
        counted = {name: each.usage for name, each in found.items() if each.usage is not None and each.fields}
        return {wire.named(name): usage for name, usage in (by_tokens | counted).items()}

    async def is_seeded(self, show: ShowId, fence: int) -> bool:
        """Whether Redis books the show under this fence."""
        [found] = await state.show_states(self.client, [self.keys.of_show(str(show))])
        return found.fence == fence

    async def tell(self, show: ShowId, change: Change | None = None, *, raised: int = 0) -> None:
        """Bring a change of limits, or a fence that was `raised` without one, to Redis, after its commit."""
        reply = await self.limits.push(show, change, raised=raised)
        if isinstance(reply, Uncounted):
            await recount.recount(self, show, bury=False)
        if isinstance(reply, Missed | Uncounted):
            await self.catch_up(show)

    async def catch_up(self, show: ShowId) -> bool:
        """Bring all limits, and the fence, to where PostgreSQL has them; False when the show must be seeded first.

        One at a time in this process, and beside a recount of another nobody begins one: each would end the other's.
        """
        async with self._catching_up.setdefault(show, asyncio.Lock()):
            for _ in range(CATCHING_UP_MAX):
                match await self.limits.reseed(show):
                    case Written() | Newer():
                        return True
                    case Uncounted():
                        if not await self._recounted_by_another(show):
                            await recount.recount(self, show, bury=False)
                    case Unseeded() | Missed():
                        return False
        return False

    async def _recounted_by_another(self, show: ShowId) -> bool:
        """Wait for a recount that is under way, unless it takes too long: then it died, or rests a lot."""
        keys = self.keys.of_show(str(show))
        for turn in range(OTHERS_TURNS):
            [found] = await state.show_states(self.client, [keys])
            if not found.recounting:
                return turn > 0
            await asyncio.sleep(OTHERS_TURN_S)
        return False

    async def adopt(self, show: ShowId, groups: Sequence[Group], *, under: int) -> int | None:
        """Count what has rows already, whatever the limits say; how many tokens were not there, None when Redis does
        not take them now.

        A group that is not `capped` is counted at the three shared levels: neither its job nor its layer may have
        limits in Redis.
        """
        must_know = [0 if group.capped else None for group in groups]
        reply = await self._ask(show, groups, must_know, ask="all", under=under)
        return sum(told.fit for told in reply.groups) if isinstance(reply, Booked) else None

    async def forget(self, show: ShowId, fence: int, tokens: Iterable[int]) -> int:
        """Take tokens out of Redis that lie in a grave under `fence`; how many were there. Redis tells what they held,
        for whoever never knew it, or has lost the reply that told."""
        keys = self.keys.of_show(str(show))
        held = await state.numbers(self.client, keys, tokens)
        by_number: dict[str, list[int]] = {}
        for token, number in held.items():
            by_number.setdefault(number, []).append(token)
        charges = await state.charges(self.client, keys, by_number)
        groups = [Group(charge, NOBODY, by_number[number]) for number, charge in charges.items()]
        forgotten = 0
        for piece in state.pieces(groups, GROUPS_PER_CALL):
            reply = await self.publisher.release(show, fence, piece)
            forgotten += reply.tokens if isinstance(reply, Forgotten) else 0
        return forgotten

    async def _attempt(self, show: ShowId, groups: Batch, *, force: bool) -> list[Outcome]:
        booked = await self._book(show, groups, "force" if force else "limits")
        if isinstance(booked, Apart):
            return together(groups, await self._attempt(show, apart(groups), force=force))
        if booked is None:
            return await undecided(self.database, show, groups, Why.UNSEEDED)
        held = [_held(group, told) for group, told in zip(groups, booked.groups, strict=True)]
        rows = [group.only(tokens) for group, tokens in zip(groups, held, strict=True) if tokens]
        faults.at("live.after_script")
        inserted = await procs.insert(self.database, show, booked.fence, rows) if rows else procs.Inserted()
        if inserted.refused:
            await self._give_back(show, booked.fence, rows, inserted.refused)
        if any(told.before for told in booked.groups):
            older = await self._look_up(show, groups, booked.groups)
            held = [[*tokens, *told.older] for tokens, told in zip(held, booked.groups, strict=True)]
            inserted = procs.Inserted([*inserted.already, *older.already], inserted.refused | older.refused)
        return [_outcome(*each, inserted) for each in zip(groups, booked.groups, held, strict=True)]

    async def _look_up(self, show: ShowId, groups: Batch, told: Sequence[Told]) -> procs.Inserted:
        """What became of tokens that Redis holds since an earlier fence: they have a row, or never get one by that
        booking. Limits may have been lowered since, so those without a row are given back, to be decided anew."""
        older = {token: fence for each in told for token, fence in each.older.items()}
        rows = [group.only(list(each.older)) for group, each in zip(groups, told, strict=True) if each.before]
        found = await procs.insert(self.database, show, NO_FENCE, rows)
        for fence in set(older.values()):
            refused = {token: why for token, why in found.refused.items() if older[token] == fence}
            await self._give_back(show, fence, rows, refused)
        return found

    async def _book(self, show: ShowId, groups: Batch, ask: str) -> Booked | Apart | None:
        """What the script decided, once it knows every limit there is; None when the show is not seeded."""
        must_know = [3 if group.capped else None for group in groups]
        for left in reversed(range(TEACHINGS + 1)):
            reply = await self._ask(show, groups, must_know, ask=ask, skip=not left)
            faults.reply("live.book")
            if isinstance(reply, Apart):
                return reply
            if not isinstance(reply, Booked):
                return None
            unknown = [at for at, told in enumerate(reply.groups) if told.unknown]
            if not unknown or not left:
                return reply
            there, told = await self.limits.teach(show, {name for at in unknown for name in _names(groups[at])})
            if isinstance(told, Missed | Uncounted):
                await self.catch_up(show)
            for at in unknown:
                must_know[at] = _must_know(groups[at], there)
        raise AssertionError("unreachable: the last round returns")

    async def _ask(
        self,
        show: ShowId,
        groups: Batch,
        must_know: Sequence[int | None],
        *,
        ask: str,
        skip: bool = True,
        under: int = 0,
    ) -> Booked | Apart | Unseeded | Damaged:
        keys = self.keys.of_show(str(show))
        wired = wire.wired(keys, groups, must_know)
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
        if isinstance(reply, Damaged):
            log.warning("books_damaged", show=str(show), key=reply.where, remedy="the show is seeded anew")
        if isinstance(reply, Unseeded | Damaged) and not under and self._unseeded:
            self._unseeded(show)
        return reply

    async def _give_back(self, show: ShowId, fence: int, rows: Batch, refused: Mapping[int, Why]) -> None:
        """What PostgreSQL refused is not booked. A duplicate stays: its token may stand for the other's row."""
        groups = [
            group.only(tokens)
            for group in rows
            if (tokens := [token for token in group.tokens if refused.get(token, Why.DUPLICATE) is not Why.DUPLICATE])
        ]
        faults.at("live.before_give_back")
        if groups:
            await self.publisher.give_back(show, fence, groups)


async def undecided(database: Database, show: ShowId, groups: Batch, why: Why) -> list[Outcome]:
    """Redis decides nothing now, because of `why`; PostgreSQL tells which tokens have rows from an earlier call."""
    check(groups)
    found = await procs.insert(database, show, NO_FENCE, groups)
    refused = {token: why if each is Why.STALE_FENCE else each for token, each in found.refused.items()}
    already = set(found.already)
    return [
        Outcome(
            already=[token for token in group.tokens if token in already],
            declined={token: refused[token] for token in group.tokens if token in refused},
        )
        for group in groups
    ]


def _names(group: Group | Swarm) -> list[str]:
    """Of all that limits it; a swarm is limited by what its frames share."""
    levels = LEVELS if isinstance(group, Group) else SHARED
    return [wire.name(level, group.charge.key(level)) for level in levels]


def _must_know(group: Group | Swarm, there: set[str]) -> int | None:
    """Which of job and layer have limits in PostgreSQL, so that Redis must have them before it books."""
    if isinstance(group, Swarm):
        return None
    return sum(bit for level, bit in _MUST_KNOW.items() if wire.name(level, group.charge.key(level)) in there)


def _held(group: Group | Swarm, told: Told) -> Sequence[int]:
    """Tokens that Redis holds under its fence, in the order given."""
    if not told.already and not told.otherwise and not told.before:
        return group.tokens[: told.fit]
    there = {*told.already, *told.otherwise, *told.older}
    absent = [token for token in group.tokens if token not in there]
    held = {*absent[: told.fit], *told.already}
    return [token for token in group.tokens if token in held]


def _outcome(group: Group | Swarm, told: Told, held: Sequence[int], inserted: procs.Inserted) -> Outcome:
    if len(held) == len(group.tokens) and not inserted.already and not inserted.refused:
        return Outcome(booked=held)
    mine = set(held)
    already = [token for token in inserted.already if token in mine]
    declined = {token: why for token, why in inserted.refused.items() if token in mine}
    declined |= dict.fromkeys(told.otherwise, Why.DUPLICATE)
    barred = {*already, *declined}
    booked = [token for token in held if token not in barred] if barred else held
    rest = [token for token in group.tokens if token not in mine and token not in declined]
    if not rest:
        return Outcome(booked, already, (), declined)
    if told.unknown in _UNKNOWN:
        return Outcome(booked, already, (), declined | dict.fromkeys(rest, _UNKNOWN[told.unknown]))
    if told.unknown in _MUST_KNOW:
        return Outcome(booked, already, (), declined | dict.fromkeys(rest, Why.STALE_FENCE))
    return Outcome(booked, already, rest, declined, _refusal(group, told))


def _refusal(group: Group | Swarm, told: Told) -> Refusal:
    ask = group.charge.ask
    if told.unknown is Level.SUBSCRIPTION:
        resource = Resource.CORES if ask.cores else Resource.GPUS
        return Refusal(Level.SUBSCRIPTION, resource, 0, 0, ask.of(resource))
    resource = RESOURCES[told.resource - 1]
    return Refusal(LEVELS[told.level - 1], resource, told.current, told.cap, ask.of(resource))
