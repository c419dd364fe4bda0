"""Checks the Redis keys of a show against each other: buckets, tokens, charges and limits.

Scripts change them atomically, so they are consistent at any instant. This module reads them one after the other beside
running bookings, so a flaw in one sample means little; one that persists over several samples comes from a manual
change. Read-only.
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
"""A key, the field in it, and the difference."""
BUCKETS_PER_CALL: Final = 64
_VERSION = re.compile(r"[0-9]{1,16}-?")


async def find_flaws(client: Redis, keys: ShowRedisKeys) -> set[IntegrityFlaw]:
    """Flaws of one sample; the show's own count of charges is read after the charges it must cover."""
    holders: Counter[str] = Counter()
    found = await _check_buckets(client, keys, holders)
    found |= await _check_charges(client, keys, holders)
    return found | await _check_limits(client, keys)


async def _check_buckets(client: Redis, keys: ShowRedisKeys, holders: Counter[str]) -> set[IntegrityFlaw]:
    """Also counts the tokens of each charge number into `holders`."""
    with translate_errors(client):
        try:
            scored: list[tuple[bytes, float]] = await client.zrange(keys.buckets, 0, -1, withscores=True)  # type: ignore[assignment]
        except ResponseError:
            return {(keys.buckets, "", 0)}
    valid = {member for member, score in scored if member.isdigit() and int(member) == score}
    found: set[IntegrityFlaw] = {(keys.buckets, str(member), 0) for member, _ in scored if member not in valid}
    numbers = sorted(map(int, valid))
    for chunk in live_reader.chunked(numbers, BUCKETS_PER_CALL):
        bucket_keys = [keys.tokens(number) for number in chunk]
        with translate_errors(client):
            pipe = client.pipeline(transaction=False)
            for key in bucket_keys:
                pipe.hgetall(key)
            answers = await pipe.execute(raise_on_error=False)
        for key, answer in zip(bucket_keys, answers, strict=True):
            found |= _check_bucket(key, answer, holders)
    return found


def _check_bucket(key: str, answer: object, holders: Counter[str]) -> set[IntegrityFlaw]:
    if isinstance(answer, ResponseError):
        return {(key, "", 0)}
    if isinstance(answer, Exception):
        raise answer
    assert isinstance(answer, dict)
    holders.update(number.decode("utf-8", "replace") for number in answer.values())
    invalid = {(key, str(field), 0) for field in answer if not field.isdigit() or int(field) >= script_args.SPAN}
    return invalid if answer else {(key, "", 0)}


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
        if difference := holders.pop(number, 0) - charged.tokens:
            found.add((keys.charges, number, difference))
    found |= {(keys.charges, number, tokens) for number, tokens in holders.items()}
    counter = await _read_number(client, keys.show, "charges")
    return found | {(keys.show, "charges", 0)} if last and (counter is None or counter < last) else found


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
    difference = (await _read_number(client, keys.show, "limits") or 0) - length
    return found | {(keys.limits, "", difference)} if difference else found


async def _read_number(client: Redis, key: str, field: str) -> int | None:
    with translate_errors(client):
        try:
            found = await client.hget(key, field)
        except ResponseError:
            return None
    return int(found) if found is not None and found.isdigit() else None
