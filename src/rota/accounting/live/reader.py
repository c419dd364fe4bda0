"""Reads the state of a show in Redis, in bounded chunks. Read-only, except `unlink`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Final, TypeVar
from uuid import UUID

import msgspec
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from rota.accounting.ledger import Charge
from rota.accounting.live import script_args
from rota.infra.redis import RedisKeys, ShowRedisKeys, translate_errors
from rota.model.errors import InvalidInput
from rota.model.quota import Usage
from rota.model.units import Centicores, parse_cores

CHUNK_SIZE: Final = 512
"""Keys or fields per call."""

EXACT_MAX: Final = 2**53
"""Numbers in the scripts are exact up to here."""

T = TypeVar("T")


class ShowState(msgspec.Struct, frozen=True):
    """The fields of `acct:show:{show}`; `fence` is None unless it was written on the current run of the server."""

    fence: int | None = None
    seeding: int | None = None
    recounting: bool = False


class CounterValues(msgspec.Struct, frozen=True):
    """The counters of one hash; `usage` is None when they cannot be read."""

    usage: Usage | None
    fields: dict[str, str] = {}


def chunked(items: Sequence[T], size: int = CHUNK_SIZE) -> Iterator[Sequence[T]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]


async def run_id(client: Redis) -> str:
    with translate_errors(client):
        return str((await client.info("server"))["run_id"])


async def show_states(client: Redis, shows: Sequence[ShowRedisKeys]) -> list[ShowState]:
    """One state per show, in order; a key of the wrong type yields an empty state."""
    if not shows:
        return []
    run = (await run_id(client)).encode()
    with translate_errors(client):
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
    fence, written_on, seeding, recount = found
    current = written_on == run
    return ShowState(
        _parse_int(fence) if current else None, _parse_int(seeding) if current else None, recount is not None
    )


def _parse_int(text: bytes | None) -> int | None:
    """Parse like the scripts do: anything else than such a number counts as missing."""
    return int(text) if text is not None and text.isdigit() and int(text) <= EXACT_MAX else None


async def scan_hash(client: Redis, key: str) -> AsyncIterator[tuple[str, str]]:
    """Fields and values of a hash of any size; nothing if the key has another type."""
    cursor = 0
    while True:
        with translate_errors(client):
            try:
                cursor, found = await client.hscan(key, cursor, count=CHUNK_SIZE)
            except ResponseError:
                return
        assert isinstance(found, dict)
        for field, value in found.items():
            yield _decode_text(field), _decode_text(value)
        if cursor == 0:
            return


def _decode_text(found: bytes | str) -> str:
    return found.decode("utf-8", "replace") if isinstance(found, bytes) else found


async def names_in_use(client: Redis, keys: ShowRedisKeys) -> set[str]:
    """Short names of everything that has limits or tokens in Redis."""
    names = {name async for name, _ in scan_hash(client, keys.limits)}
    async for _, text in scan_hash(client, keys.charges):
        if charged := script_args.parse_charge(text):
            names.update(script_args.counter_names(charged.text))
    return {name for name in names if is_counter_name(name)}


async def usage_by_name(client: Redis, keys: ShowRedisKeys) -> dict[str, Usage]:
    """Sums over tokens, by short name: the expected value of every counter."""
    sums: dict[str, Usage] = {}
    async for _, text in scan_hash(client, keys.charges):
        if charged := script_args.parse_charge(text):
            for name in script_args.counter_names(charged.text):
                sums[name] = sums.get(name, Usage()).plus(charged.charge.ask, charged.tokens)
    return sums


def is_counter_name(text: str) -> bool:
    try:
        script_args.parse_counter_name(text)
    except (KeyError, ValueError):
        return False
    return True


async def buckets(client: Redis, keys: ShowRedisKeys, below: int | None = None, most: int | None = None) -> list[int]:
    """Buckets of tokens below `below`, descending."""
    start = None if most is None else 0
    highest = "+inf" if below is None else f"({below}"
    with translate_errors(client):
        try:
            found = await client.zrevrangebyscore(keys.buckets, highest, "-inf", start=start, num=most)
        except ResponseError:
            return []
    numbers = (_parse_int(each) for each in found if isinstance(each, bytes))
    return [number for number in numbers if number is not None]


async def held_tokens(client: Redis, keys: ShowRedisKeys, numbers: Sequence[int]) -> list[int]:
    """The tokens that Redis holds in these buckets; an unreadable bucket has none."""
    with translate_errors(client):
        pipe = client.pipeline(transaction=False)
        for bucket in numbers:
            pipe.hkeys(keys.tokens(bucket))
        answers = await pipe.execute(raise_on_error=False)
    tokens: list[int] = []
    for bucket, answer in zip(numbers, answers, strict=True):
        if isinstance(answer, list):
            places = (_parse_int(each) for each in answer)
            tokens += [(bucket << script_args.SPAN_BITS) + place for place in places if place is not None]
        elif not isinstance(answer, ResponseError):
            raise answer
    return tokens


async def charge_numbers(client: Redis, keys: ShowRedisKeys, tokens: Iterable[int]) -> dict[int, str]:
    """Charge numbers of those tokens that Redis holds; an unreadable bucket yields none."""
    by_bucket: dict[int, list[int]] = {}
    for token in tokens:
        by_bucket.setdefault(token >> script_args.SPAN_BITS, []).append(token)
    found: dict[int, str] = {}
    for chunk in chunked(list(by_bucket)):
        with translate_errors(client):
            pipe = client.pipeline(transaction=False)
            for bucket in chunk:
                pipe.hmget(keys.tokens(bucket), [token % script_args.SPAN for token in by_bucket[bucket]])
            answers = await pipe.execute(raise_on_error=False)
        for bucket, held in zip(chunk, answers, strict=True):
            if isinstance(held, list):
                each = zip(by_bucket[bucket], held, strict=True)
                found |= {token: _decode_text(number) for token, number in each if number is not None}
            elif not isinstance(held, ResponseError):
                raise held
    return found


async def read_charges(client: Redis, keys: ShowRedisKeys, numbers: Iterable[str]) -> dict[str, Charge]:
    """The charges of these numbers; numbers without tokens are missing."""
    found: dict[str, Charge] = {}
    for chunk in chunked(sorted(numbers)):
        with translate_errors(client):
            try:
                texts = await client.hmget(keys.charges, list(chunk))
            except ResponseError:
                return {}
        for number, text in zip(chunk, texts, strict=True):
            if text is not None and (charged := script_args.parse_charge(_decode_text(text))):
                found[number] = charged.charge
    return found


async def scan_keys(client: Redis, keys: RedisKeys, pattern: str) -> list[str]:
    """Every key of one declared pattern; scans all keys of the server in bounded steps."""
    with translate_errors(client):
        found = [
            _decode_text(key) async for key in client.scan_iter(match=keys.scan_pattern(pattern), count=CHUNK_SIZE)
        ]
    return [key for key in found if keys.parse(pattern, key)]


async def unlink(client: Redis, keys: Sequence[str]) -> None:
    for chunk in chunked(keys):
        with translate_errors(client):
            await client.unlink(*chunk)


def is_uuid(text: str) -> bool:
    try:
        UUID(text)
    except ValueError:
        return False
    return True


async def read_counters(client: Redis, keys: ShowRedisKeys, names: Iterable[str]) -> dict[str, CounterValues]:
    """The hashes of these short names."""
    found: dict[str, CounterValues] = {}
    for chunk in chunked(sorted(names)):
        with translate_errors(client):
            pipe = client.pipeline(transaction=False)
            for name in chunk:
                pipe.hgetall(keys.counter_key(name))
            answers = await pipe.execute(raise_on_error=False)
        found |= {name: _counters_from_reply(answer) for name, answer in zip(chunk, answers, strict=True)}
    return found


def _counters_from_reply(answer: object) -> CounterValues:
    if isinstance(answer, ResponseError):
        return CounterValues(None)
    if isinstance(answer, Exception):
        raise answer
    assert isinstance(answer, dict)
    fields = {_decode_text(name): _decode_text(value) for name, value in answer.items()}
    return CounterValues(parse_usage(fields.get("int_cores", "0"), fields.get("int_gpus", "0")), fields)


def parse_usage(cores: str, gpus: str) -> Usage | None:
    """Parse counters written by the scripts; None for anything else."""
    try:
        return Usage(Centicores(parse_cores(cores)), int(gpus))
    except (InvalidInput, ValueError):
        return None
