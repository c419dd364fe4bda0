"""What Redis knows of a show: read in bounded pieces, changing nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Final, TypeVar
from uuid import UUID

import msgspec
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from rota.accounting.ledger import Charge
from rota.accounting.live import wire
from rota.infra.redis import Keys, ShowKeys, guard
from rota.model.errors import InvalidInput
from rota.model.quota import Usage
from rota.model.units import Centicores, parse_cores

PIECE: Final = 512
"""Keys or fields asked for in one call."""

EXACT_MAX: Final = 2**53
"""The scripts' numbers are exact up to here."""

T = TypeVar("T")


class ShowState(msgspec.Struct, frozen=True):
    """The fields of `acct:show:{show}`; `fence` is None unless it was written on the present run of the server."""

    fence: int | None = None
    seeding: int | None = None
    recounting: bool = False


class Counted(msgspec.Struct, frozen=True):
    """The counters of one hash; None when they cannot be read."""

    usage: Usage | None
    fields: dict[str, str] = {}


def pieces(of: Sequence[T], size: int = PIECE) -> Iterator[Sequence[T]]:
    for first in range(0, len(of), size):
        yield of[first : first + size]


async def run_id(client: Redis) -> str:
    with guard(client):
        return str((await client.info("server"))["run_id"])


async def show_states(client: Redis, shows: Sequence[ShowKeys]) -> list[ShowState]:
    """One state per show, in order; a key of the wrong type is no state."""
    if not shows:
        return []
    run = (await run_id(client)).encode()
    with guard(client):
        pipe = client.pipeline(transaction=False)
        for keys in shows:
            pipe.hmget(keys.show, "fence", "run", "seeding", "recount")
        found = await pipe.execute(raise_on_error=False)
    return [_show_state(each, run) for each in found]


def _show_state(found: object, run: bytes) -> ShowState:
    if isinstance(found, ResponseError):
        return ShowState()
    if isinstance(found, Exception):
        raise found
    assert isinstance(found, list)
    fence, at, seeding, recount = found
    here = at == run
    return ShowState(_whole(fence) if here else None, _whole(seeding) if here else None, recount is not None)


def _whole(text: bytes | None) -> int | None:
    """As the scripts read it: what is no such number is as good as missing."""
    return int(text) if text is not None and text.isdigit() and int(text) <= EXACT_MAX else None


async def fields_of(client: Redis, key: str) -> AsyncIterator[tuple[str, str]]:
    """Fields and values of a hash of any size; nothing if it is none."""
    cursor = 0
    while True:
        with guard(client):
            try:
                cursor, found = await client.hscan(key, cursor, count=PIECE)
            except ResponseError:
                return
        assert isinstance(found, dict)
        for field, value in found.items():
            yield _text(field), _text(value)
        if cursor == 0:
            return


def _text(found: bytes | str) -> str:
    return found.decode("utf-8", "replace") if isinstance(found, bytes) else found


async def names_in_use(client: Redis, keys: ShowKeys) -> set[str]:
    """Short names of everything that has limits, or holds tokens, in Redis."""
    names = {name async for name, _ in fields_of(client, keys.limits)}
    async for _, text in fields_of(client, keys.charges):
        if charged := wire.read_charge(text):
            names.update(wire.names_of(charged.text))
    return {name for name in names if is_name(name)}


async def held(client: Redis, keys: ShowKeys) -> dict[str, Usage]:
    """What tokens hold, by short name: what every counter should say."""
    sums: dict[str, Usage] = {}
    async for _, text in fields_of(client, keys.charges):
        if charged := wire.read_charge(text):
            for name in wire.names_of(charged.text):
                sums[name] = sums.get(name, Usage()).plus(charged.charge.ask, charged.tokens)
    return sums


def is_name(text: str) -> bool:
    try:
        wire.named(text)
    except (KeyError, ValueError):
        return False
    return True


async def buckets(client: Redis, keys: ShowKeys, below: int | None = None, most: int | None = None) -> list[int]:
    """Buckets of tokens below `below`, descending."""
    start = None if most is None else 0
    highest = "+inf" if below is None else f"({below}"
    with guard(client):
        try:
            found = await client.zrevrangebyscore(keys.buckets, highest, "-inf", start=start, num=most)
        except ResponseError:
            return []
    numbers = (_whole(each) for each in found if isinstance(each, bytes))
    return [number for number in numbers if number is not None]


async def numbers(client: Redis, keys: ShowKeys, tokens: Iterable[int]) -> dict[int, str]:
    """Those of the tokens that Redis holds, and the numbers of what they hold; none of a bucket that cannot be read."""
    by_bucket: dict[int, list[int]] = {}
    for token in tokens:
        by_bucket.setdefault(token >> wire.SPAN_BITS, []).append(token)
    found: dict[int, str] = {}
    for piece in pieces(list(by_bucket)):
        with guard(client):
            pipe = client.pipeline(transaction=False)
            for bucket in piece:
                pipe.hmget(keys.tokens(bucket), [token % wire.SPAN for token in by_bucket[bucket]])
            answers = await pipe.execute(raise_on_error=False)
        for bucket, held in zip(piece, answers, strict=True):
            if isinstance(held, list):
                each = zip(by_bucket[bucket], held, strict=True)
                found |= {token: _text(number) for token, number in each if number is not None}
            elif not isinstance(held, ResponseError):
                raise held
    return found


async def charges(client: Redis, keys: ShowKeys, numbers: Iterable[str]) -> dict[str, Charge]:
    """What these numbers stand for; those that nobody holds any more are left out."""
    found: dict[str, Charge] = {}
    for piece in pieces(sorted(numbers)):
        with guard(client):
            try:
                texts = await client.hmget(keys.charges, list(piece))
            except ResponseError:
                return {}
        for number, text in zip(piece, texts, strict=True):
            if text is not None and (charged := wire.read_charge(_text(text))):
                found[number] = charged.charge
    return found


async def keys_like(client: Redis, keys: Keys, pattern: str) -> list[str]:
    """Every key of one declared pattern; walks all keys of the server in bounded steps."""
    with guard(client):
        found = [_text(key) async for key in client.scan_iter(match=keys.matching(pattern), count=PIECE)]
    return [key for key in found if keys.words(pattern, key)]


async def unlink(client: Redis, places: Sequence[str]) -> None:
    for piece in pieces(places):
        with guard(client):
            await client.unlink(*piece)


def is_id(text: str) -> bool:
    try:
        UUID(text)
    except ValueError:
        return False
    return True


async def counted(client: Redis, keys: ShowKeys, names: Iterable[str]) -> dict[str, Counted]:
    """The hashes of these short names as they stand."""
    found: dict[str, Counted] = {}
    for piece in pieces(sorted(names)):
        with guard(client):
            pipe = client.pipeline(transaction=False)
            for name in piece:
                pipe.hgetall(keys.counting(name))
            answers = await pipe.execute(raise_on_error=False)
        found |= {name: _counted(answer) for name, answer in zip(piece, answers, strict=True)}
    return found


def _counted(answer: object) -> Counted:
    if isinstance(answer, ResponseError):
        return Counted(None)
    if isinstance(answer, Exception):
        raise answer
    assert isinstance(answer, dict)
    fields = {_text(name): _text(value) for name, value in answer.items()}
    return Counted(usage_of(fields.get("int_cores", "0"), fields.get("int_gpus", "0")), fields)


def usage_of(cores: str, gpus: str) -> Usage | None:
    """Counters as written by the scripts; None for what they would not write."""
    try:
        return Usage(Centicores(parse_cores(cores)), int(gpus))
    except (InvalidInput, ValueError):
        return None
