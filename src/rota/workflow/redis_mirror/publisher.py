"""Writes changes of timers and sagas to Redis after their commit, without delaying anyone.

Changes enter a queue that one task drains in batches, one Redis call each; the load determines the batch size. When the
queue is full or Redis is unavailable, changes are dropped and counted; a crash loses the queue. The reconciler repairs
both, since the mirror can always be rebuilt from PostgreSQL. For a timer the last change in the queue counts; a saga is
read when it is published, so duplicates merge.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import Final, TypeVar
from uuid import UUID

import structlog
from redis.exceptions import RedisError

from rota.infra.postgres.failures import FAILURES
from rota.infra.service import Lifecycle
from rota.infra.telemetry import metrics
from rota.model.errors import RotaError
from rota.model.workflows.run_state import RunState, TimerFired
from rota.workflow.advance_transaction import AdvanceResult
from rota.workflow.notifier import SagaKey
from rota.workflow.redis_mirror.sagas import SagaMirror
from rota.workflow.redis_mirror.timers import MirroredTimer, TimerMirror
from rota.workflow.run_context import RunContext

log = structlog.get_logger(__name__)
QUEUE_MAX: Final = 20_000
TIMERS_BATCH_MAX: Final = 500
SAGAS_BATCH_MAX: Final = 100
FAILURE_BACKOFF_S: Final = 1.0
K = TypeVar("K")
V = TypeVar("V")

PUBLISHED = metrics.counter(
    "rota_workflow_view_told", "Changes written to the Redis mirror, by view.", labels=("view",)
)
DROPPED = metrics.counter(
    "rota_workflow_view_dropped", "Changes not written to the Redis mirror, by reason.", labels=("view", "reason")
)


class MirrorPublisher:
    def __init__(self, timers: TimerMirror, sagas: SagaMirror) -> None:
        self.timers = timers
        self.sagas = sagas
        self._timers: dict[tuple[UUID, int, int], tuple[MirroredTimer, bool]] = {}
        self._sagas: dict[SagaKey, None] = {}
        self._pending = asyncio.Event()

    def runs_advanced(self, done: AdvanceResult) -> None:
        for context in done.turns:
            for timer in _removed_timers(context):
                self._enqueue("timers", self._timers, (timer.run, timer.place, timer.attempt), (timer, False))
            for added in context.transition.timers:
                timer = MirroredTimer(context.workflow, context.run, added.place, added.attempt, added.due_ms)
                self._enqueue("timers", self._timers, (timer.run, timer.place, timer.attempt), (timer, True))
            if context.state is RunState.SUCCEEDED and context.depth == 0 and self._may_have_saga(context.workflow):
                self.sagas_changed([(context.show, str(context.root))])

    def sagas_changed(self, sagas: Sequence[SagaKey]) -> None:
        for named in sagas:
            self._enqueue("sagas", self._sagas, named, None)

    async def run(self, life: Lifecycle) -> None:
        flush_task = asyncio.create_task(self._flush_loop(), name="workflow.mirror")
        draining = asyncio.create_task(life.until_draining(), name="workflow.mirror.draining")
        life.ready()
        try:
            await asyncio.wait({flush_task, draining}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            flush_task.cancel()
            draining.cancel()
            await asyncio.wait({flush_task, draining})
        if not flush_task.cancelled():
            flush_task.result()

    async def flush(self) -> bool:
        """Write the queue in batches; False when a write failed."""
        done = True
        while done and (self._timers or self._sagas):
            timers = [change for _, change in _pop_batch(self._timers, TIMERS_BATCH_MAX)]
            sagas = [named for named, _ in _pop_batch(self._sagas, SAGAS_BATCH_MAX)]
            done = await _publish("timers", self._publish_timers, timers) and await _publish(
                "sagas", self.sagas.publish, sagas
            )
        return done

    async def _flush_loop(self) -> None:
        while True:
            await self._pending.wait()
            self._pending.clear()
            if not await self.flush():
                await asyncio.sleep(FAILURE_BACKOFF_S)
                self._pending.set()

    async def _publish_timers(self, changes: Sequence[tuple[MirroredTimer, bool]]) -> None:
        if added := [timer for timer, exists in changes if exists]:
            await self.timers.add(added)
        if removed := [timer for timer, exists in changes if not exists]:
            await self.timers.remove(removed)

    def _enqueue(self, view: str, queue: dict[K, V], key: K, change: V) -> None:
        if len(queue) >= QUEUE_MAX and key not in queue:
            DROPPED.labels(view, "full").inc()
            return
        queue[key] = change
        self._pending.set()

    def _may_have_saga(self, workflow: int) -> bool:
        """Whether its runs can have a saga of their own; jobs that are not steps may join one as well."""
        flow = self.timers.definitions.cached(workflow)
        if flow is None:
            return True
        return any(step.spec.compensate is not None or step.spec.type == "workflow" for step in flow.steps)


async def _publish(view: str, write: Callable[[list[V]], Awaitable[None]], changes: list[V]) -> bool:
    if not changes:
        return True
    try:
        await write(changes)
    except (RotaError, RedisError, OSError, *FAILURES) as error:
        reason = error.code if isinstance(error, RotaError) else type(error).__name__
        DROPPED.labels(view, reason).inc(len(changes))
        log.warning("redis_mirror_write_failed", view=view, changes=len(changes), reason=reason)
        return False
    PUBLISHED.labels(view).inc(len(changes))
    return True


def _pop_batch(queue: dict[K, V], most: int) -> list[tuple[K, V]]:
    return [(key, queue.pop(key)) for key in list(islice(queue, most))]


def _removed_timers(context: RunContext) -> list[MirroredTimer]:
    """Timers that have fired or were cancelled."""
    fired = [(message.place, message.attempt) for message in context.inbox if isinstance(message, TimerFired)]
    return [
        MirroredTimer(context.workflow, context.run, place, attempt)
        for place, attempt in (*fired, *context.transition.untimed)
    ]
