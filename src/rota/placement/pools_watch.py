"""Loads the file of `routing.pools_file` at start and whenever its content changes.

- A file that cannot be read or loaded changes nothing: routes stay, the log reports each error once, and every check
  tries again. A missing pool may exist by then.
- Every replica checks, and may have another version of the file during a rollout. Each loads its copy when it starts
  and when that copy changes, so the last change wins and versions do not alternate. Equal content is loaded once, by
  the first replica (`RouteStore.load`).

A crash between reading and loading leaves the file to the next check of any replica.
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
    """Run as `Service("pools_file", watcher.run)`, after one `reload` before anything is routed."""

    def __init__(self, routing: RouteStore, path: Path, every_s: float = RELOAD_INTERVAL_S) -> None:
        self._routing = routing
        self._path = path
        self._every_s = every_s
        self._loaded: bytes | None = None
        self._last_error: str | None = None

    async def run(self, life: Lifecycle) -> None:
        """Ends as unavailable when PostgreSQL is, and is restarted."""
        await self.reload()
        life.ready()
        while await life.pause(self._every_s):
            await self.reload()

    async def reload(self) -> bool:
        """Load the file if it changed since the last load; returns whether that changed anything."""
        try:
            changed = await self._load()
        except InvalidInput as error:
            self._report_refusal(error.sentence)
            return False
        self._last_error = None
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
        if sentence != self._last_error:
            log.error("pools_file_refused", path=str(self._path), reason=sentence)
        self._last_error = sentence
