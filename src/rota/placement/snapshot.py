"""The workers in one Redis key, so that a replica that starts need not wait for heartbeats.

One replica at a time writes: under a lock that ends by itself, and in one step that checks the lock, writes and frees
it, so one that was paused in between writes nothing and frees nothing. A lock that is held is somebody else's turn.
Ages are told by the clock of Redis, so machines need not agree on the hour.

Reading never holds up a start, and never fails it: a document that is missing, broken, late or not to be had means a
cold start with a warning. A worker enters with its real age, and not at all when it would have been forgotten; it is
used only where no other has room, until it is heard. What was heard stands.

If we die after the lock was taken, it runs out, and the next replica writes: the document is then older by that time.
"""

from __future__ import annotations

import asyncio
import secrets
from datetime import UTC, datetime
from uuid import UUID

import msgspec
import redis.asyncio
import structlog

from rota.infra import failpoints
from rota.infra.redis import RedisKeys, script, translate_errors
from rota.infra.service import Lifecycle
from rota.model.errors import RotaError
from rota.model.settings.lifecycle import RegistrySettings
from rota.placement.registry import WorkerRegistry
from rota.placement.requirements import normalize_capabilities
from rota.placement.scoring import WorkerLoad
from rota.placement.workers import WorkerInfo, clamp_percent

log = structlog.get_logger(__name__)


class PoolSnapshot(msgspec.Struct, frozen=True):
    status: str = "active"
    requires: tuple[str, ...] = ()
    workers: int = 0


class WorkerSnapshot(msgspec.Struct, frozen=True):
    """`*_free` is what was not booked; `age_ms` is how long ago it was heard when this was written."""

    worker_id: str = ""
    name: str = ""
    pool: str = ""
    active_jobs: int = 0
    max_parallel_jobs: int = 0
    capabilities: tuple[str, ...] = ()
    cpu_load: float = 0.0
    gpu_utilization: float = 0.0
    memory_load: float = 0.0
    region: str = ""
    type: str = ""
    labels: dict[str, str] = {}
    cores_free: int = 0
    gpus_free: int = 0
    memory_mb_free: int = 0
    draining: bool = False
    age_ms: int = 0


class RegistrySnapshot(msgspec.Struct, frozen=True):
    captured_at: datetime
    writer_id: str
    pools: dict[str, PoolSnapshot] = {}
    topics: dict[str, tuple[str, ...]] = {}
    workers: list[WorkerSnapshot] = []


class SnapshotWritten(msgspec.Struct, frozen=True, tag="written"):
    pass


class SnapshotLockLost(msgspec.Struct, frozen=True, tag="lost"):
    pass


WRITE = script(__package__, "snapshot_write", replies=SnapshotWritten | SnapshotLockLost)


class SnapshotWriter:
    """`Service("snapshot", writer.run)`: every replica may run it, one writes at a time."""

    def __init__(
        self,
        registry: WorkerRegistry,
        client: redis.asyncio.Redis,
        writer_id: str,
        settings: RegistrySettings | None = None,
        keys: RedisKeys | None = None,
    ) -> None:
        self._registry = registry
        self._client = client
        self._writer_id = writer_id
        self._settings = settings or RegistrySettings()
        self._keys = keys or RedisKeys()
        self._failing = False

    async def run(self, life: Lifecycle) -> None:
        life.ready()
        while True:
            await self._write_or_warn()
            if not await life.pause(self._settings.snapshot_interval):
                return

    async def write(self) -> bool:
        """Whether it was our turn, and done."""
        token = secrets.token_hex(16)
        lock_ms = int(self._settings.snapshot_lock_ttl * 1000)
        with translate_errors(self._client):
            if not await self._client.set(self._keys.snapshot_writer(), token, nx=True, px=lock_ms):
                log.debug("snapshot_turn_of_another")
                return False
        failpoints.hit("placement.after_snapshot_lock")
        document = msgspec.json.encode(capture(self._registry, self._writer_id, await _now_ms(self._client)))
        done = await WRITE(
            self._client,
            writer=self._keys.snapshot_writer(),
            snapshot=self._keys.workers_snapshot(),
            token=token,
            document=document,
        )
        return isinstance(done, SnapshotWritten)

    async def _write_or_warn(self) -> None:
        """Redis may be away: the snapshot is a convenience, and its absence is told once."""
        try:
            await self.write()
            self._failing = False
        except RotaError as error:
            if not self._failing:
                log.warning("snapshot_not_written", reason=error.sentence)
            self._failing = True


async def warm_start(
    registry: WorkerRegistry, client: redis.asyncio.Redis, *, keys: RedisKeys | None = None, timeout_s: float = 5.0
) -> int:
    """Enter the workers of the snapshot; how many. Whatever goes wrong is a cold start."""
    try:
        async with asyncio.timeout(timeout_s):
            with translate_errors(client):
                document = await client.get((keys or RedisKeys()).workers_snapshot())
            now_ms = await _now_ms(client)
        if document is None:
            log.info("cold_start", reason="there is no snapshot yet")
            return 0
        snapshot = msgspec.json.decode(document, type=RegistrySnapshot)
    except (RotaError, redis.RedisError, TimeoutError, msgspec.MsgspecError, UnicodeError) as error:
        log.warning("cold_start", reason=type(error).__name__, remedy="heartbeats fill the registry within seconds")
        return 0
    entered = hydrate(registry, snapshot, now_ms)
    log.info("warm_start", workers=entered, of=len(snapshot.workers), writer=snapshot.writer_id)
    return entered


def capture(registry: WorkerRegistry, writer_id: str, now_ms: int) -> RegistrySnapshot:
    workers = [_worker_snapshot(worker, registry.age_s(worker)) for worker in registry.workers.values()]
    routes = registry.routes
    pools = {
        name: PoolSnapshot(pool.spec.status_at(now_ms), pool.spec.provides, sum(each.pool == name for each in workers))
        for name, pool in routes.pools.items()
    }
    return RegistrySnapshot(datetime.fromtimestamp(now_ms / 1000, UTC), writer_id, pools, dict(routes.topics), workers)


def hydrate(registry: WorkerRegistry, snapshot: RegistrySnapshot, now_ms: int) -> int:
    """A moment in the future is a clock that was set: its workers are taken to be as old as they say."""
    captured = snapshot.captured_at
    captured_ms = (captured if captured.tzinfo else captured.replace(tzinfo=UTC)).timestamp() * 1000
    since_s = max(0.0, now_ms - captured_ms) / 1000
    entered = 0
    for seen in snapshot.workers:
        try:
            worker = _restore_worker(seen)
        except ValueError:
            continue
        entered += registry.hydrate(worker, since_s + max(0, seen.age_ms) / 1000)
    return entered


def _worker_snapshot(worker: WorkerInfo, age_s: float) -> WorkerSnapshot:
    free = worker.free_resources()
    return WorkerSnapshot(
        worker_id=str(worker.id),
        name=worker.name,
        pool=worker.pool,
        active_jobs=worker.frames,
        max_parallel_jobs=worker.slots,
        capabilities=tuple(sorted(worker.capabilities)),
        cpu_load=worker.load.cpu,
        gpu_utilization=worker.load.gpu,
        memory_load=worker.memory_load,
        region=worker.labels.get("region", ""),
        type=worker.labels.get("type", ""),
        labels=worker.labels,
        cores_free=free.cores,
        gpus_free=free.gpus,
        memory_mb_free=free.memory_mb,
        draining=worker.draining,
        age_ms=int(age_s * 1000),
    )


def _restore_worker(seen: WorkerSnapshot) -> WorkerInfo:
    """It offers what was free, since nobody knows yet what its frames need. ValueError when it has no id."""
    worker = WorkerInfo(UUID(seen.worker_id), seen.name, seen.pool, 0.0)
    worker.slots = max(0, seen.max_parallel_jobs)
    worker.cores = seen.cores_free
    worker.gpus = seen.gpus_free
    worker.memory_mb = seen.memory_mb_free
    worker.labels = seen.labels
    worker.capabilities = frozenset(normalize_capabilities(seen.capabilities))
    worker.draining = seen.draining
    worker.load = WorkerLoad(clamp_percent(seen.cpu_load), clamp_percent(seen.gpu_utilization), 100.0, 100.0)
    worker.memory_load = clamp_percent(seen.memory_load)
    # Tokens are never negative, so these are nobody's; the first heartbeat replaces them.
    worker.strangers = [(-seen.active_jobs, seen.active_jobs)] if seen.active_jobs > 0 else []
    return worker


async def _now_ms(client: redis.asyncio.Redis) -> int:
    with translate_errors(client):
        seconds, micros = await client.time()
    return int(seconds) * 1000 + int(micros) // 1000
