"""Admin resources of an app, imported on first use: `app.shows`, `app.sync.shows`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic

from rota.client.resource import M

if TYPE_CHECKING:
    from rota.client.admin import DeadLettersResource, JobsResource, KeysResource, LedgerResource, PrincipalsResource
    from rota.client.agents import AgentsResource
    from rota.client.approvals import ApprovalsResource
    from rota.client.outputs import OutputsResource
    from rota.client.pools import PoolsResource, QueuesResource, TopicsResource, WorkersResource
    from rota.client.shows import DepartmentsResource, FoldersResource, ShowsResource, SubscriptionsResource
    from rota.sdk.app import Rota
    from rota.sdk.workflow.run import WorkflowsResource


class AdminClient(Generic[M]):
    """Calls need a key with a sufficient role: viewers list, operators drain and pause, admins change."""

    def __init__(self, mode: type[M]) -> None:
        self._mode: type[M] = mode

    def _connection_owner(self) -> Rota:
        """The app whose connections are used."""
        raise AssertionError

    @property
    def shows(self) -> ShowsResource[M]:
        from rota.client.shows import ShowsResource

        return ShowsResource(self._connection_owner(), self._mode)

    @property
    def folders(self) -> FoldersResource[M]:
        from rota.client.shows import FoldersResource

        return FoldersResource(self._connection_owner(), self._mode)

    @property
    def subscriptions(self) -> SubscriptionsResource[M]:
        from rota.client.shows import SubscriptionsResource

        return SubscriptionsResource(self._connection_owner(), self._mode)

    @property
    def departments(self) -> DepartmentsResource[M]:
        from rota.client.shows import DepartmentsResource

        return DepartmentsResource(self._connection_owner(), self._mode)

    @property
    def pools(self) -> PoolsResource[M]:
        from rota.client.pools import PoolsResource

        return PoolsResource(self._connection_owner(), self._mode)

    @property
    def topics(self) -> TopicsResource[M]:
        from rota.client.pools import TopicsResource

        return TopicsResource(self._connection_owner(), self._mode)

    @property
    def workers(self) -> WorkersResource[M]:
        from rota.client.pools import WorkersResource

        return WorkersResource(self._connection_owner(), self._mode)

    @property
    def queues(self) -> QueuesResource[M]:
        from rota.client.pools import QueuesResource

        return QueuesResource(self._connection_owner(), self._mode)

    @property
    def agents(self) -> AgentsResource[M]:
        from rota.client.agents import AgentsResource

        return AgentsResource(self._connection_owner(), self._mode)

    @property
    def workflows(self) -> WorkflowsResource[M]:
        from rota.sdk.workflow.run import WorkflowsResource

        return WorkflowsResource(self._connection_owner(), self._mode)

    @property
    def approvals(self) -> ApprovalsResource[M]:
        from rota.client.approvals import ApprovalsResource

        return ApprovalsResource(self._connection_owner(), self._mode)

    @property
    def jobs(self) -> JobsResource[M]:
        from rota.client.admin import JobsResource

        return JobsResource(self._connection_owner(), self._mode)

    @property
    def dlq(self) -> DeadLettersResource[M]:
        from rota.client.admin import DeadLettersResource

        return DeadLettersResource(self._connection_owner(), self._mode)

    @property
    def outputs(self) -> OutputsResource[M]:
        from rota.client.outputs import OutputsResource

        return OutputsResource(self._connection_owner(), self._mode)

    @property
    def ledger(self) -> LedgerResource[M]:
        from rota.client.admin import LedgerResource

        return LedgerResource(self._connection_owner(), self._mode)

    @property
    def keys(self) -> KeysResource[M]:
        from rota.client.admin import KeysResource

        return KeysResource(self._connection_owner(), self._mode)

    @property
    def principals(self) -> PrincipalsResource[M]:
        from rota.client.admin import PrincipalsResource

        return PrincipalsResource(self._connection_owner(), self._mode)
