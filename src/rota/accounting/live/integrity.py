"""Whether the keys of a show in Redis fit each other: buckets, tokens, charges, and what has limits.

Scripts change them together, so at any instant they fit. We read them one after the other, while bookings go on, so a
flaw that is seen once means little; one that stands still over several looks was left by a hand. Nothing is changed.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from rota.accounting.live import reader as live_reader
from rota.accounting.live import script_args
from rota.infra.redis import ShowRedisKeys, translate_errors

IntegrityFlaw = tuple[str, str, int]
"""A key, where in it, and by how much."""
BUCKETS_PER_CALL: Final = 64
_VERSION = re.compile(r"[0-9]{1,16}-?")


async def find_flaws(client: Redis, keys: ShowRedisKeys) -> set[IntegrityFlaw]:
    """What does not fit at this look; the show's own count of charges is read after those it must cover."""
    holders: Counter[str] = Counter()
    found = await _check_buckets(client, keys, holders)
    found |= await _check_charges(client, keys, holders)
    return found | await _check_limits(client, keys)


async def _check_buckets(client: Redis, keys: ShowRedisKeys, holders: Counter[str]) -> set[IntegrityFlaw]:
    """Counts into `holders` how many tokens hold which charge."""
    with translate_errors(client):
        try:
            listed: list[tuple[bytes, float]] = await client.zrange(keys.buckets, 0, -1, withscores=True)  # type: ignore[assignment]
        except ResponseError:
            return {(keys.buckets, "", 0)}
    sound = {member for member, score in listed if member.isdigit() and int(member) == score}
    found: set[IntegrityFlaw] = {(keys.buckets, str(member), 0) for member, _ in listed if member not in sound}
    numbers = sorted(map(int, sound))
    for piece in live_reader.chunked(numbers, BUCKETS_PER_CALL):
        places = [keys.tokens(number) for number in piece]
        with translate_errors(client):
            pipe = client.pipeline(transaction=False)
            for place in places:
                pipe.hgetall(place)
            answers = await pipe.execute(raise_on_error=False)
        for place, answer in zip(places, answers, strict=True):
            found |= _check_bucket(place, answer, holders)
    return found


def _check_bucket(place: str, answer: object, holders: Counter[str]) -> set[IntegrityFlaw]:
    if isinstance(answer, ResponseError):
        return {(place, "", 0)}
    if isinstance(answer, Exception):
        raise answer
    assert isinstance(answer, dict)
    holders.update(number.decode("utf-8", "replace") for number in answer.values())
    strange = {(place, str(field), 0) for field in answer if not field.isdigit() or int(field) >= script_args.SPAN}
    return strange if answer else {(place, "", 0)}


async def _check_charges(client: Redis, keys: ShowRedisKeys, holders: Counter[str]) -> set[IntegrityFlaw]:
    found: set[IntegrityFlaw] = set()
    last = 0
    with translate_errors(client):
        kind = await client.type(keys.charges)
    if kind not in (b"hash", b"none"):
        return {(keys.charges, "", 0)}
    async for number, text in live_reader.scan_hash(client, keys.charges):
        charged = script_args.parse_charge(text)
        if charged is None or not number.isascii() or not number.isdigit():
            found.add((keys.charges, number, 0))
            continue
        last = max(last, int(number))
        if astray := holders.pop(number, 0) - charged.tokens:
            found.add((keys.charges, number, astray))
    found |= {(keys.charges, number, tokens) for number, tokens in holders.items()}
    given = await _read_number(client, keys.show, "charges")
    return found | {(keys.show, "charges", 0)} if last and (given is None or given < last) else found


async def _check_limits(client: Redis, keys: ShowRedisKeys) -> set[IntegrityFlaw]:
    with translate_errors(client):
        try:
            length = await client.hlen(keys.limits)
        except ResponseError:
            return {(keys.limits, "", 0)}
    found = {
        (keys.limits, name, 0)
        async for name, version in live_reader.scan_hash(client, keys.limits)
        if not live_reader.is_counter_name(name) or not _VERSION.fullmatch(version)
    }
    astray = (await _read_number(client, keys.show, "limits") or 0) - length
    return found | {(keys.limits, "", astray)} if astray else found


async def _read_number(client: Redis, key: str, field: str) -> int | None:
    with translate_errors(client):
        try:
            found = await client.hget(key, field)
        except ResponseError:
            return None
    return int(found) if found is not None and found.isdigit() else None
