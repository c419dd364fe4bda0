"""When keys were last used: noted in memory on a request's way, written in batches beside it.

A key's row is written at most once a minute, whoever of the replicas does it (the statement sees to that). What was not
written when we die is lost: the time is for people who look for keys that nobody uses. While PostgreSQL is away uses
are kept; there is one entry per key that was let in, so memory is bounded by the keys there are.
"""

from __future__ import annotations

from typing import Final

from rota.infra.clock import Clock
from rota.infra.postgres import Database, query
from rota.infra.service import Lifecycle
from rota.model.api_key_format import KeyId

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
        """When PostgreSQL is away this ends as unavailable and is started again."""
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
