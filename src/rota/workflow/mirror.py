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
from rota.model.workflow_run import Fired, RunState
from rota.workflow.advancing import Done
from rota.workflow.saga_mirror import Named, SagaMirror
from rota.workflow.timer_index import Timed, TimerIndex
from rota.workflow.turns import Turn

log = structlog.get_logger(__name__)
QUEUE_MAX: Final = 20_000
TIMERS_AT_ONCE: Final = 500
SAGAS_AT_ONCE: Final = 100
AFTER_FAILURE_S: Final = 1.0
K = TypeVar("K")
V = TypeVar("V")

TOLD = metrics.counter("rota_workflow_view_told", "Changes that Redis was told of, by what it shows.", labels=("view",))
DROPPED = metrics.counter(
    "rota_workflow_view_dropped", "Changes that Redis was not told of: the poller mends it.", labels=("view", "reason")
)


class Mirror:
    def __init__(self, timers: TimerIndex, sagas: SagaMirror) -> None:
        self.timers = timers
        self.sagas = sagas
        self._timers: dict[tuple[UUID, int, int], tuple[Timed, bool]] = {}
        self._sagas: dict[Named, None] = {}
        self._reason = asyncio.Event()

    def heard(self, done: Done) -> None:
        """For `Advancer.on_done`."""
        for turn in done.turns:
            for timer in _over(turn):
                self._add("timers", self._timers, (timer.run, timer.place, timer.attempt), (timer, False))
            for made in turn.moves.timers:
                timer = Timed(turn.workflow, turn.run, made.place, made.attempt, made.due_ms)
                self._add("timers", self._timers, (timer.run, timer.place, timer.attempt), (timer, True))
            if turn.state is RunState.SUCCEEDED and turn.depth == 0 and self._may_undo(turn.workflow):
                self.changed([(turn.show, str(turn.root))])

    def changed(self, sagas: Sequence[Named]) -> None:
        """For `Sagas.on_change`."""
        for named in sagas:
            self._add("sagas", self._sagas, named, None)

    async def run(self, life: Lifecycle) -> None:
        telling = asyncio.create_task(self._tell_on(), name="workflow.mirror")
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

    async def tell(self) -> bool:
        """All that waits to be told, a batch at a time; False when some of it could not be."""
        done = True
        while done and (self._timers or self._sagas):
            timers = [change for _, change in _taken(self._timers, TIMERS_AT_ONCE)]
            sagas = [named for named, _ in _taken(self._sagas, SAGAS_AT_ONCE)]
            done = await _try("timers", self._tell_timers, timers) and await _try("sagas", self.sagas.tell, sagas)
        return done

    async def _tell_on(self) -> None:
        while True:
            await self._reason.wait()
            self._reason.clear()
            if not await self.tell():
                await asyncio.sleep(AFTER_FAILURE_S)
                self._reason.set()

    async def _tell_timers(self, changes: Sequence[tuple[Timed, bool]]) -> None:
        if made := [timer for timer, is_there in changes if is_there]:
            await self.timers.add(made)
        if over := [timer for timer, is_there in changes if not is_there]:
            await self.timers.remove(over)

    def _add(self, view: str, queue: dict[K, V], key: K, change: V) -> None:
        if len(queue) >= QUEUE_MAX and key not in queue:
            DROPPED.labels(view, "full").inc()
            return
        queue[key] = change
        self._reason.set()

    def _may_undo(self, workflow: int) -> bool:
        """Whether runs of it have a saga, unless jobs that are no steps of theirs have joined one."""
        flow = self.timers.definitions.known(workflow)
        if flow is None:
            return True
        return any(step.spec.compensate is not None or step.spec.type == "workflow" for step in flow.steps)


async def _try(view: str, tell: Callable[[list[V]], Awaitable[None]], changes: list[V]) -> bool:
    if not changes:
        return True
    try:
        await tell(changes)
    except (RotaError, RedisError, OSError, *FAILURES) as error:
        reason = error.code if isinstance(error, RotaError) else type(error).__name__
        DROPPED.labels(view, reason).inc(len(changes))
        log.warning("view_not_told", view=view, changes=len(changes), reason=reason)
        return False
    TOLD.labels(view).inc(len(changes))
    return True


def _taken(queue: dict[K, V], most: int) -> list[tuple[K, V]]:
    return [(key, queue.pop(key)) for key in list(islice(queue, most))]


def _over(turn: Turn) -> list[Timed]:
    """Timers that have fired, or are not wanted any more."""
    fired = [(news.place, news.attempt) for news in turn.news if isinstance(news, Fired)]
    return [Timed(turn.workflow, turn.run, place, attempt) for place, attempt in (*fired, *turn.moves.untimed)]
