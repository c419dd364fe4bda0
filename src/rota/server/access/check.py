"""Whose key it is: looked up in PostgreSQL, and remembered for a few seconds.

- Nobody is let in whom PostgreSQL did not confirm within `REMEMBER_S`. While it is away, who was confirmed stays good
  for the rest of that time and everybody else is refused as unavailable.
- All that is remembered is forgotten as soon as any key, grant or name of a show changes (NOTIFY), and when we may have
  missed that. What was being read meanwhile answers those who asked before, and is not remembered.
- A key expires on the clock of PostgreSQL: the time that is left comes with the row and is counted down here.
- Digests are compared in constant time, also for ids that nobody has. Who has the secret is told that the key expired
  or was revoked; who has not learns nothing.
- Guessing costs no storm of queries: one statement is under way at a time, for all who wait; ids that nobody has are
  remembered in a place of their own, so they push out no good ones.

If we are paused, what is remembered has become too old when we wake, or is forgotten when we hear the news.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from itertools import islice
from typing import Final

import asyncpg
import msgspec

from rota.infra.clock import Clock, SystemClock
from rota.infra.postgres import Database, Notifications, query
from rota.infra.service import Lifecycle, Service
from rota.infra.telemetry import metrics
from rota.model.access import Actor
from rota.model.api_key_format import KeyId, PlainKey, parse_key
from rota.model.errors import PostgresUnavailable, RotaError, Unauthenticated
from rota.server.access.keys import ApiKeyState, decode_grants
from rota.server.access.uses import KeyUseRecorder

LOOKUP_KEYS = query(__package__, "keys_look")
REFUSED = metrics.counter("rota_access_refused", "Calls refused for their key.", labels=("reason",))

CHANNEL: Final = "rota_keys"
CACHE_TTL_S: Final = 5.0
KNOWN_CACHE_MAX: Final = 4096
UNKNOWN_CACHE_MAX: Final = 4096
BATCH_MAX: Final = 512


class KeyLookup(msgspec.Struct, frozen=True):
    """What PostgreSQL said about an id; `actor` is None when nobody has it."""

    at_s: float
    digest: bytes
    actor: Actor | None = None
    state: ApiKeyState = "active"
    expires_s: float | None = None
    """On the clock that `at_s` is of."""


class KeyCache:
    """What was looked up lately, the oldest left out when there is too much of it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[KeyId, KeyLookup] = {}

    def get(self, key: KeyId) -> KeyLookup | None:
        return self._held.get(key)

    def put(self, key: KeyId, looked: KeyLookup) -> None:
        self._held.pop(key, None)
        self._held[key] = looked
        if len(self._held) > self._most:
            del self._held[next(iter(self._held))]

    def clear(self) -> None:
        self._held.clear()


class KeyCheck:
    """Says who stands behind a key. One per process, with `services` supervised beside it."""

    def __init__(self, database: Database, clock: Clock | None = None, *, remember_s: float = CACHE_TTL_S) -> None:
        self._database = database
        self._clock = clock or SystemClock()
        self._remember_s = remember_s
        self._known = KeyCache(KNOWN_CACHE_MAX)
        self._unknown = KeyCache(UNKNOWN_CACHE_MAX)
        self._wanted: dict[KeyId, asyncio.Future[KeyLookup]] = {}
        self._turn = asyncio.Lock()
        self._forgotten = 0
        # As long as a real one, and equal to none.
        self._nobody = secrets.token_bytes(32)
        self.uses = KeyUseRecorder(database, self._clock)

    def services(self) -> list[Service]:
        return [Service("keys", self.watch_changes), Service("key_uses", self.uses.run)]

    async def check(self, text: str) -> Actor:
        """Who it is; raises Unauthenticated, or Unavailable when that cannot be known now."""
        try:
            plain = parse_key(text)
            looked = self._cached(plain.id) or await self._lookup(plain.id)
            actor = self._verify(plain, looked)
        except RotaError as error:
            REFUSED.labels(error.facts.get("reason", "unavailable")).inc()
            raise
        self.uses.record(actor.key)
        return actor

    async def watch_changes(self, life: Lifecycle) -> None:
        """Hear of changes. When PostgreSQL is away this ends as unavailable and is started again."""
        async with self._database.listen(CHANNEL) as told:
            self.invalidate()
            hearing = asyncio.create_task(self._consume_notifications(told), name="keys.hear")
            try:
                life.ready()
                await life.until_draining()
            finally:
                hearing.cancel()
                await asyncio.wait([hearing])

    async def _consume_notifications(self, told: Notifications) -> None:
        async for _ in told:
            self.invalidate()

    def invalidate(self) -> None:
        self._forgotten += 1
        self._known.clear()
        self._unknown.clear()

    def _cached(self, key: KeyId) -> KeyLookup | None:
        looked = self._known.get(key) or self._unknown.get(key)
        if looked is None or self._clock.monotonic() - looked.at_s >= self._remember_s:
            return None
        return looked

    def _verify(self, plain: PlainKey, looked: KeyLookup) -> Actor:
        if not hmac.compare_digest(plain.digest, looked.digest) or looked.actor is None:
            raise Unauthenticated(
                "The key is not known here: check that it is one of this installation, or have one made with"
                " `rota keys create`.",
                reason="unknown",
            )
        if looked.state == "revoked":
            raise Unauthenticated("The key was revoked: have another made with `rota keys create`.", reason="revoked")
        if looked.state == "expired" or self._has_expired(looked):
            raise Unauthenticated("The key has expired: have another made with `rota keys create`.", reason="expired")
        return looked.actor

    def _has_expired(self, looked: KeyLookup) -> bool:
        return looked.expires_s is not None and self._clock.monotonic() >= looked.expires_s

    async def _lookup(self, key: KeyId) -> KeyLookup:
        """Whoever has the turn asks for all that wait; the others find their answer when the turn comes to them."""
        answer = self._wanted.get(key)
        if answer is None:
            answer = self._wanted[key] = asyncio.get_running_loop().create_future()
        async with self._turn:
            while not answer.done():
                await self._lookup_batch()
        return answer.result()

    async def _lookup_batch(self) -> None:
        """One statement for those who have waited longest. Who is cancelled here leaves them to the next."""
        asked = dict(islice(self._wanted.items(), BATCH_MAX))
        try:
            found = await self._fetch(list(asked))
        except RotaError as error:
            for key, answer in asked.items():
                del self._wanted[key]
                answer.set_exception(error)
                answer.exception()  # seen, also where the one who asked has gone
            return
        for key, answer in asked.items():
            del self._wanted[key]
            answer.set_result(found[key])

    async def _fetch(self, keys: list[KeyId]) -> dict[KeyId, KeyLookup]:
        forgotten, at_s = self._forgotten, self._clock.monotonic()
        try:
            rows = await self._database.rows(LOOKUP_KEYS, keys)
        except asyncpg.PostgresError as error:
            raise PostgresUnavailable(
                f"Keys cannot be looked up now ({type(error).__name__}): try again in a moment."
            ) from error
        found = {key: KeyLookup(at_s, self._nobody) for key in keys}
        for row in rows:
            actor = Actor(KeyId(row["id"]), row["name"], decode_grants(row["grants"]))
            left_s = row["expires_in_s"]
            expires_s = None if left_s is None else at_s + left_s
            found[actor.key] = KeyLookup(at_s, row["digest"], actor, row["state"], expires_s)
        if forgotten == self._forgotten:
            for key, looked in found.items():
                (self._unknown if looked.actor is None else self._known).put(key, looked)
        return found
