"""What workflows report after the commit of a batch of runs or sagas (`rota.workflow.run_publisher`).

Anything lost here is found by polling: the reconcilers of the mirror and of the runs repair it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from rota.model.ids import ShowId

if TYPE_CHECKING:
    from rota.workflow.advance_transaction import AdvanceResult
    from rota.workflow.sagas import SagaPassResult

SagaKey = tuple[ShowId, str]


class RunNotifier(Protocol):
    async def runs_advanced(self, done: AdvanceResult, /) -> None: ...

    def saga_pass_ended(self, result: SagaPassResult, /) -> None: ...

    def sagas_changed(self, sagas: Sequence[SagaKey], /) -> None: ...


class UnpublishedRuns:
    """For a process without a replica: the servers publish what they find by polling."""

    async def runs_advanced(self, done: AdvanceResult, /) -> None: ...

    def saga_pass_ended(self, result: SagaPassResult, /) -> None: ...

    def sagas_changed(self, sagas: Sequence[SagaKey], /) -> None: ...
