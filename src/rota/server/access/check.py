"""Authenticates API keys: looks them up in PostgreSQL and caches the result for a few seconds.

- A key is accepted only if PostgreSQL confirmed it within `CACHE_TTL_S`. While PostgreSQL is unavailable, cached keys
  stay valid for the rest of that time and all others get Unavailable.
- The whole cache is cleared when any key, grant or show name changes or a principal is disabled (NOTIFY), and after a
  reconnect, when notifications may have been missed. A lookup that was in flight meanwhile answers its waiters and is
  not cached.
- Expiry follows PostgreSQL's clock: the row carries the remaining time, which is counted down on the monotonic clock.
- Digests are compared in constant time, for unknown ids too. Only a caller with the right secret learns that the key
  expired, was revoked or belongs to a disabled principal.
- Guessing cannot cause a query storm: one batched statement is in flight at a time. Unknown ids have a cache of their
  own, so they cannot evict known keys.

If the process is paused, its cache entries have expired when it resumes, or the pending notification clears them.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from itertools import islice
from typing import Final

import asyncpg
import msgspec

from rota.api.admin import KeyState
from rota.infra.clock import Clock, SystemClock
from rota.infra.postgres import Database, Notifications, Record, query
from rota.infra.service import Lifecycle, Service
from rota.infra.telemetry import metrics
from rota.model.access import Actor
from rota.model.errors import PostgresUnavailable, RotaError, Unauthenticated
from rota.model.identity.api_key_format import KeyId, PlainKey, parse_key
from rota.model.identity.principals import Principal
from rota.server.access.keys import decode_grants
from rota.server.access.uses import KeyUseRecorder

LOOKUP_KEYS = query(__package__, "keys_look")
REFUSED = metrics.counter("rota_access_refused", "Calls refused for their key.", labels=("reason",))

CHANNEL: Final = "rota_keys"
CACHE_TTL_S: Final = 5.0
KNOWN_CACHE_MAX: Final = 4096
UNKNOWN_CACHE_MAX: Final = 4096
BATCH_MAX: Final = 512


class KeyLookup(msgspec.Struct, frozen=True):
    """The lookup result for a key id; `actor` is None when the id is unknown."""

    at_s: float
    digest: bytes
    actor: Actor | None = None
    state: KeyState = "active"
    expires_s: float | None = None
    """On the same monotonic clock as `at_s`."""


class KeyCache:
    """Recent lookups; evicts the oldest when full."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries: dict[KeyId, KeyLookup] = {}

    def get(self, key: KeyId) -> KeyLookup | None:
        return self._entries.get(key)

    def put(self, key: KeyId, lookup: KeyLookup) -> None:
        self._entries.pop(key, None)
        self._entries[key] = lookup
        if len(self._entries) > self._max_entries:
            del self._entries[next(iter(self._entries))]

    def clear(self) -> None:
        self._entries.clear()


class KeyCheck:
    """Maps a key to its actor. One per process; supervise its `services`."""

    def __init__(self, database: Database, clock: Clock | None = None, *, remember_s: float = CACHE_TTL_S) -> None:
        self._database = database
        self._clock = clock or SystemClock()
        self._cache_ttl_s = remember_s
        self._known = KeyCache(KNOWN_CACHE_MAX)
        self._unknown = KeyCache(UNKNOWN_CACHE_MAX)
        self._pending: dict[KeyId, asyncio.Future[KeyLookup]] = {}
        self._lookup_lock = asyncio.Lock()
        self._generation = 0
        # As long as a real digest, and equal to none.
        self._dummy_digest = secrets.token_bytes(32)
        self.uses = KeyUseRecorder(database, self._clock)

    def services(self) -> list[Service]:
        return [Service("keys", self.watch_changes), Service("key_uses", self.uses.run)]

    async def check(self, text: str) -> Actor:
        """The actor of the key. Raises Unauthenticated, or Unavailable when it cannot be looked up."""
        try:
            plain = parse_key(text)
            lookup = self._cached(plain.id) or await self._lookup(plain.id)
            actor = self._verify(plain, lookup)
        except RotaError as error:
            REFUSED.labels(error.facts.get("reason", "unavailable")).inc()
            raise
        self.uses.record(actor.key)
        return actor

    async def watch_changes(self, life: Lifecycle) -> None:
        """Clear the cache on notifications. Raises Unavailable without PostgreSQL; the supervisor restarts it."""
        async with self._database.listen(CHANNEL) as notifications:
            self.invalidate()
            consumer = asyncio.create_task(self._consume_notifications(notifications), name="keys.hear")
            try:
                life.ready()
                await life.until_draining()
            finally:
                consumer.cancel()
                await asyncio.wait([consumer])

    async def _consume_notifications(self, notifications: Notifications) -> None:
        async for _ in notifications:
            self.invalidate()

    def invalidate(self) -> None:
        self._generation += 1
        self._known.clear()
        self._unknown.clear()

    def _cached(self, key: KeyId) -> KeyLookup | None:
        lookup = self._known.get(key) or self._unknown.get(key)
        if lookup is None or self._clock.monotonic() - lookup.at_s >= self._cache_ttl_s:
            return None
        return lookup

    def _verify(self, plain: PlainKey, lookup: KeyLookup) -> Actor:
        if not hmac.compare_digest(plain.digest, lookup.digest) or lookup.actor is None:
            raise Unauthenticated(
                "The API key is unknown: check that it belongs to this installation, or create one with"
                " `rota keys create`.",
                reason="unknown",
            )
        if lookup.state == "revoked":
            raise Unauthenticated("The API key was revoked: create another with `rota keys create`.", reason="revoked")
        if lookup.state == "disabled":
            raise Unauthenticated(
                f"The principal {lookup.actor.principal.name} of this API key is disabled: use a key of another one.",
                reason="disabled",
            )
        if lookup.state == "expired" or self._has_expired(lookup):
            raise Unauthenticated("The API key has expired: create another with `rota keys create`.", reason="expired")
        return lookup.actor

    def _has_expired(self, lookup: KeyLookup) -> bool:
        return lookup.expires_s is not None and self._clock.monotonic() >= lookup.expires_s

    async def _lookup(self, key: KeyId) -> KeyLookup:
        """Batch concurrent lookups: the lock holder queries for all waiters, who then find their future resolved."""
        future = self._pending.get(key)
        if future is None:
            future = self._pending[key] = asyncio.get_running_loop().create_future()
        async with self._lookup_lock:
            while not future.done():
                await self._lookup_batch()
        return future.result()

    async def _lookup_batch(self) -> None:
        """One statement for the oldest waiters. If cancelled, they stay pending for the next lock holder."""
        batch = dict(islice(self._pending.items(), BATCH_MAX))
        try:
            found = await self._fetch(list(batch))
        except RotaError as error:
            for key, future in batch.items():
                del self._pending[key]
                future.set_exception(error)
                future.exception()  # mark it retrieved: the waiter may be gone
            return
        for key, future in batch.items():
            del self._pending[key]
            future.set_result(found[key])

    async def _fetch(self, keys: list[KeyId]) -> dict[KeyId, KeyLookup]:
        generation, at_s = self._generation, self._clock.monotonic()
        try:
            rows = await self._database.rows(LOOKUP_KEYS, keys)
        except asyncpg.PostgresError as error:
            raise PostgresUnavailable(
                f"Keys cannot be looked up now ({type(error).__name__}): try again in a moment."
            ) from error
        found = {key: KeyLookup(at_s, self._dummy_digest) for key in keys}
        for row in rows:
            actor = _actor_from_row(row)
            remaining_s = row["expires_in_s"]
            expires_s = None if remaining_s is None else at_s + remaining_s
            found[actor.key] = KeyLookup(at_s, row["digest"], actor, row["state"], expires_s)
        if generation == self._generation:
            for key, lookup in found.items():
                (self._unknown if lookup.actor is None else self._known).put(key, lookup)
        return found


def _actor_from_row(row: Record) -> Actor:
    principal = Principal(row["principal"], row["b_global"], row["shared_name"])
    return Actor(KeyId(row["id"]), row["name"], principal, decode_grants(row["grants"]))
