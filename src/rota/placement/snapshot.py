"""A snapshot of the registry in one Redis key, so that a starting replica need not wait for heartbeats.

One replica at a time writes, under a lock with a TTL. One script checks the lock, writes and releases it, so a replica
that was paused in between writes and releases nothing. If the lock is held, another replica is writing. Ages use the
clock of Redis, so the clocks of machines need not agree.

Reading never delays or fails a start: a missing, broken, late or unavailable document means a cold start with a
warning. A worker is added with its real age, or skipped when it is past the TTL; until its first heartbeat it is used
only where no other worker has capacity. Heartbeats take precedence over the snapshot.

If the writer dies holding the lock, it expires and the next replica writes: the document is older by that time.
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
from rota.model.heartbeats import HEARTBEAT_INTERVAL_S
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
    """`*_free` is what was not booked; `age_ms` is the time since its last heartbeat when this was written."""

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
    heartbeat_s: float = HEARTBEAT_INTERVAL_S


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
    """Run as `Service("snapshot", writer.run)` in every replica; one writes at a time."""

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
        """Whether this replica got the lock and wrote."""
        token = secrets.token_hex(16)
        lock_ms = int(self._settings.snapshot_lock_ttl * 1000)
        with translate_errors(self._client):
            if not await self._client.set(self._keys.snapshot_writer(), token, nx=True, px=lock_ms):
                log.debug("snapshot_lock_held")
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
        """Redis may be unavailable: the snapshot is optional, so a failure is logged once."""
        try:
            await self.write()
            self._failing = False
        except RotaError as error:
            if not self._failing:
                log.warning("snapshot_write_failed", reason=error.sentence)
            self._failing = True


async def warm_start(
    registry: WorkerRegistry, client: redis.asyncio.Redis, *, keys: RedisKeys | None = None, timeout_s: float = 5.0
) -> int:
    """Add the workers of the snapshot; returns how many. Any failure means a cold start."""
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
    added = hydrate(registry, snapshot, now_ms)
    log.info("warm_start", workers=added, of=len(snapshot.workers), writer=snapshot.writer_id)
    return added


def capture(registry: WorkerRegistry, writer_id: str, now_ms: int) -> RegistrySnapshot:
    workers = [_worker_snapshot(worker, registry.age_s(worker)) for worker in registry.workers.values()]
    routes = registry.routes
    pools = {
        name: PoolSnapshot(pool.spec.status_at(now_ms), pool.spec.provides, sum(each.pool == name for each in workers))
        for name, pool in routes.pools.items()
    }
    return RegistrySnapshot(datetime.fromtimestamp(now_ms / 1000, UTC), writer_id, pools, dict(routes.topics), workers)


def hydrate(registry: WorkerRegistry, snapshot: RegistrySnapshot, now_ms: int) -> int:
    """A capture time in the future means that the clock was set: the ages are then used as stored."""
    captured = snapshot.captured_at
    captured_ms = (captured if captured.tzinfo else captured.replace(tzinfo=UTC)).timestamp() * 1000
    since_s = max(0.0, now_ms - captured_ms) / 1000
    added = 0
    for stored in snapshot.workers:
        try:
            worker = _restore_worker(stored)
        except ValueError:
            continue
        added += registry.hydrate(worker, since_s + max(0, stored.age_ms) / 1000)
    return added


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
        heartbeat_s=worker.heartbeat_s,
    )


def _restore_worker(stored: WorkerSnapshot) -> WorkerInfo:
    """It offers what was free, since the needs of its frames are unknown yet. ValueError when it has no id."""
    worker = WorkerInfo(UUID(stored.worker_id), stored.name, stored.pool, 0.0)
    worker.slots = max(0, stored.max_parallel_jobs)
    worker.cores = stored.cores_free
    worker.gpus = stored.gpus_free
    worker.memory_mb = stored.memory_mb_free
    worker.labels = stored.labels
    worker.capabilities = frozenset(normalize_capabilities(stored.capabilities))
    worker.draining = stored.draining
    worker.heartbeat_s = stored.heartbeat_s
    worker.load = WorkerLoad(clamp_percent(stored.cpu_load), clamp_percent(stored.gpu_utilization), 100.0, 100.0)
    worker.memory_load = clamp_percent(stored.memory_load)
    # Tokens are never negative, so these match no booking; the first heartbeat replaces them.
    worker.unbooked = [(-stored.active_jobs, stored.active_jobs)] if stored.active_jobs > 0 else []
    return worker


async def _now_ms(client: redis.asyncio.Redis) -> int:
    with translate_errors(client):
        seconds, micros = await client.time()
    return int(seconds) * 1000 + int(micros) // 1000
