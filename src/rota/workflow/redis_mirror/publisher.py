"""What Redis shows of timers and sagas, told after the commit that changed them and off everybody's way.

Whatever changes is put into a queue that one task empties: a call of Redis for a batch, and batches are made by load.
Nobody waits for it. When the queue is full, or Redis is away, a change is dropped and counted, and so it is if we die:
`poller` finds out, since Redis can always be made of PostgreSQL again. Of a timer that comes and goes the last word
counts; a saga is read when it is told, so being told of it twice is being told once.
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
from rota.workflow.redis_mirror.sagas import SagaKey, SagaMirror
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
    "rota_workflow_view_told", "Changes that Redis was told of, by what it shows.", labels=("view",)
)
DROPPED = metrics.counter(
    "rota_workflow_view_dropped", "Changes that Redis was not told of: the poller mends it.", labels=("view", "reason")
)


class MirrorPublisher:
    def __init__(self, timers: TimerMirror, sagas: SagaMirror) -> None:
        self.timers = timers
        self.sagas = sagas
        self._timers: dict[tuple[UUID, int, int], tuple[MirroredTimer, bool]] = {}
        self._sagas: dict[SagaKey, None] = {}
        self._reason = asyncio.Event()

    def on_advanced(self, done: AdvanceResult) -> None:
        """For `Advancer.on_done`."""
        for turn in done.turns:
            for timer in _removed_timers(turn):
                self._enqueue("timers", self._timers, (timer.run, timer.place, timer.attempt), (timer, False))
            for made in turn.moves.timers:
                timer = MirroredTimer(turn.workflow, turn.run, made.place, made.attempt, made.due_ms)
                self._enqueue("timers", self._timers, (timer.run, timer.place, timer.attempt), (timer, True))
            if turn.state is RunState.SUCCEEDED and turn.depth == 0 and self._may_have_saga(turn.workflow):
                self.on_sagas_changed([(turn.show, str(turn.root))])

    def on_sagas_changed(self, sagas: Sequence[SagaKey]) -> None:
        """For `Sagas.on_change`."""
        for named in sagas:
            self._enqueue("sagas", self._sagas, named, None)

    async def run(self, life: Lifecycle) -> None:
        telling = asyncio.create_task(self._flush_loop(), name="workflow.mirror")
        draining = asyncio.create_task(life.until_draining(), name="workflow.mirror.draining")
        life.ready()
        try:
            await asyncio.wait({telling, draining}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            telling.cancel()
            draining.cancel()
            await asyncio.wait({telling, draining})
        if not telling.cancelled():
            telling.result()

    async def flush(self) -> bool:
        """All that waits to be told, a batch at a time; False when some of it could not be."""
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
            await self._reason.wait()
            self._reason.clear()
            if not await self.flush():
                await asyncio.sleep(FAILURE_BACKOFF_S)
                self._reason.set()

    async def _publish_timers(self, changes: Sequence[tuple[MirroredTimer, bool]]) -> None:
        if made := [timer for timer, is_there in changes if is_there]:
            await self.timers.add(made)
        if over := [timer for timer, is_there in changes if not is_there]:
            await self.timers.remove(over)

    def _enqueue(self, view: str, queue: dict[K, V], key: K, change: V) -> None:
        if len(queue) >= QUEUE_MAX and key not in queue:
            DROPPED.labels(view, "full").inc()
            return
        queue[key] = change
        self._reason.set()

    def _may_have_saga(self, workflow: int) -> bool:
        """Whether runs of it have a saga, unless jobs that are no steps of theirs have joined one."""
        flow = self.timers.definitions.cached(workflow)
        if flow is None:
            return True
        return any(step.spec.compensate is not None or step.spec.type == "workflow" for step in flow.steps)


async def _publish(view: str, tell: Callable[[list[V]], Awaitable[None]], changes: list[V]) -> bool:
    if not changes:
        return True
    try:
        await tell(changes)
    except (RotaError, RedisError, OSError, *FAILURES) as error:
        reason = error.code if isinstance(error, RotaError) else type(error).__name__
        DROPPED.labels(view, reason).inc(len(changes))
        log.warning("view_not_told", view=view, changes=len(changes), reason=reason)
        return False
    PUBLISHED.labels(view).inc(len(changes))
    return True


def _pop_batch(queue: dict[K, V], most: int) -> list[tuple[K, V]]:
    return [(key, queue.pop(key)) for key in list(islice(queue, most))]


def _removed_timers(turn: RunContext) -> list[MirroredTimer]:
    """Timers that have fired, or are not wanted any more."""
    fired = [(news.place, news.attempt) for news in turn.news if isinstance(news, TimerFired)]
    return [MirroredTimer(turn.workflow, turn.run, place, attempt) for place, attempt in (*fired, *turn.moves.untimed)]
