"""After the commit of a batch of runs or sagas: events, the mirror in Redis, and jobs to terminate."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from rota.engine.completion.canceller import JobCanceller
from rota.engine.events.sink import EventSink
from rota.infra.postgres.failures import FAILURES
from rota.model.errors import RotaError
from rota.workflow.advance_transaction import AdvanceResult
from rota.workflow.notifier import SagaKey
from rota.workflow.redis_mirror.publisher import MirrorPublisher
from rota.workflow.run_events import RunEventPublisher
from rota.workflow.sagas import SagaPassResult


class PublishedRuns:
    """For a replica."""

    def __init__(
        self, events: EventSink, run_events: RunEventPublisher, mirror: MirrorPublisher, canceller: JobCanceller
    ) -> None:
        self._events = events
        self._run_events = run_events
        self._mirror = mirror
        self._canceller = canceller

    async def runs_advanced(self, done: AdvanceResult, /) -> None:
        self._mirror.runs_advanced(done)
        self._run_events.publish_advances(done)
        if done.asked:
            self._events.approvals_requested(done.asked)
        if done.submitted:
            self._events.jobs_submitted(done.plans, done.submitted)
        for job in done.stops:
            with suppress(RotaError, *FAILURES):
                await self._canceller.continue_termination(job)

    def saga_pass_ended(self, result: SagaPassResult, /) -> None:
        self._run_events.publish_sagas(result)
        if result.submitted:
            self._events.jobs_submitted(result.plans, result.submitted)

    def sagas_changed(self, sagas: Sequence[SagaKey], /) -> None:
        self._mirror.sagas_changed(sagas)
