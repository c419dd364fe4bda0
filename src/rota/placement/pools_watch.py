"""The file that `routing.pools_file` names is loaded at start, and again whenever it says something else.

- A file that cannot be read or loaded changes nothing: routes stay as they are, the log says what is wrong, each
  thing once, and it is tried again at every look. A pool that was missing in the books may be there by then.
- Every replica looks, and may have another version of the file while one is rolled out. Each loads what it has when it
  starts and when its own copy changes, so the last change holds, and versions do not take turns. The same content is
  loaded once, whoever has it first (`Routing.load`).

Dying between reading and loading leaves it to the next look of any replica.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import structlog

from rota.infra.service import Lifecycle
from rota.infra.telemetry import metrics
from rota.model.errors import InvalidInput
from rota.placement.pools_file import read_pools_file
from rota.placement.route_store import RELOAD_INTERVAL_S, RouteStore

log = structlog.get_logger(__name__)
ACTOR: Final = "pools_file"
FILE_REFUSED = metrics.gauge("rota_pools_file_refused", "1 while the file with topics and pools cannot be loaded.")


class PoolsFileWatcher:
    """`Service("pools_file", watch.run)`, after one `look` before anything is routed."""

    def __init__(self, routing: RouteStore, path: Path, every_s: float = RELOAD_INTERVAL_S) -> None:
        self._routing = routing
        self._path = path
        self._every_s = every_s
        self._loaded: bytes | None = None
        self._wrong: str | None = None

    async def run(self, life: Lifecycle) -> None:
        """When PostgreSQL is away this ends as unavailable and is started again."""
        await self.reload()
        life.ready()
        while await life.pause(self._every_s):
            await self.reload()

    async def reload(self) -> bool:
        """Load the file, unless it is as it was when we last did. Whether that changed anything."""
        try:
            changed = await self._load()
        except InvalidInput as wrong:
            self._report_refusal(wrong.sentence)
            return False
        self._wrong = None
        FILE_REFUSED.set(0)
        return changed

    async def _load(self) -> bool:
        file = await asyncio.to_thread(read_pools_file, self._path)
        if file.digest() == self._loaded:
            return False
        changed = await self._routing.load(file, actor=ACTOR)
        self._loaded = file.digest()
        log.info("pools_file_loaded", path=str(self._path), changed=changed)
        return changed

    def _report_refusal(self, sentence: str) -> None:
        FILE_REFUSED.set(1)
        if sentence != self._wrong:
            log.error("pools_file_refused", path=str(self._path), reason=sentence)
        self._wrong = sentence
