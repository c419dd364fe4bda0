"""Last-used times of keys: recorded in memory during a request, written in batches by a service.

The statement writes a key's row at most once a minute across all replicas. Unwritten times are lost on a crash; they
only help people to find unused keys. While PostgreSQL is unavailable they are kept in memory: one entry per
authenticated key, so memory is bounded by the number of keys.
"""

from __future__ import annotations

from typing import Final

from rota.infra.clock import Clock
from rota.infra.postgres import Database, query
from rota.infra.service import Lifecycle
from rota.model.identity.api_key_format import KeyId

RECORD_USES = query(__package__, "keys_used")
FLUSH_INTERVAL_S: Final = 10.0


class KeyUseRecorder:
    """`Service("key_uses", uses.run)`."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._used: dict[KeyId, float] = {}

    def record(self, key: KeyId) -> None:
        self._used[key] = self._clock.monotonic()

    async def run(self, life: Lifecycle) -> None:
        """Raises Unavailable without PostgreSQL; the supervisor restarts it."""
        life.ready()
        while await life.pause(FLUSH_INTERVAL_S):
            await self.flush()
        await self.flush()

    async def flush(self) -> None:
        if not self._used:
            return
        used, self._used = self._used, {}
        now = self._clock.monotonic()
        try:
            await self._database.run(RECORD_USES, list(used), [now - at for at in used.values()])
        except BaseException:
            self._used = used | self._used
            raise
