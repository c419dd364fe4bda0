"""What an app administers by the API, each part imported when it is first asked for: `app.shows`, `app.sync.shows`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic

from rota.sdk.rooms import M

if TYPE_CHECKING:
    from rota.sdk.app import Rota
    from rota.sdk.approvals import Approvals
    from rota.sdk.books import Departments, Folders, Shows, Subscriptions
    from rota.sdk.office import DeadLetters, Jobs, Keys, Ledger
    from rota.sdk.outputs import Outputs
    from rota.sdk.pools import Pools, Queues, Topics, Workers
    from rota.sdk.recurring import Agents
    from rota.sdk.runs import Workflows


class Administers(Generic[M]):
    """Needs a key with the role that each call asks for: viewers list, operators drain and pause, admins change."""

    def __init__(self, mode: type[M]) -> None:
        self._mode: type[M] = mode

    def _asks(self) -> Rota:
        """The app whose connections are used."""
        raise AssertionError

    @property
    def shows(self) -> Shows[M]:
        from rota.sdk.books import Shows

        return Shows(self._asks(), self._mode)

    @property
    def folders(self) -> Folders[M]:
        from rota.sdk.books import Folders

        return Folders(self._asks(), self._mode)

    @property
    def subscriptions(self) -> Subscriptions[M]:
        from rota.sdk.books import Subscriptions

        return Subscriptions(self._asks(), self._mode)

    @property
    def departments(self) -> Departments[M]:
        from rota.sdk.books import Departments

        return Departments(self._asks(), self._mode)

    @property
    def pools(self) -> Pools[M]:
        from rota.sdk.pools import Pools

        return Pools(self._asks(), self._mode)

    @property
    def topics(self) -> Topics[M]:
        from rota.sdk.pools import Topics

        return Topics(self._asks(), self._mode)

    @property
    def workers(self) -> Workers[M]:
        from rota.sdk.pools import Workers

        return Workers(self._asks(), self._mode)

    @property
    def queues(self) -> Queues[M]:
        from rota.sdk.pools import Queues

        return Queues(self._asks(), self._mode)

    @property
    def agents(self) -> Agents[M]:
        from rota.sdk.recurring import Agents

        return Agents(self._asks(), self._mode)

    @property
    def workflows(self) -> Workflows[M]:
        from rota.sdk.runs import Workflows

        return Workflows(self._asks(), self._mode)

    @property
    def approvals(self) -> Approvals[M]:
        from rota.sdk.approvals import Approvals

        return Approvals(self._asks(), self._mode)

    @property
    def jobs(self) -> Jobs[M]:
        from rota.sdk.office import Jobs

        return Jobs(self._asks(), self._mode)

    @property
    def dlq(self) -> DeadLetters[M]:
        from rota.sdk.office import DeadLetters

        return DeadLetters(self._asks(), self._mode)

    @property
    def outputs(self) -> Outputs[M]:
        from rota.sdk.outputs import Outputs

        return Outputs(self._asks(), self._mode)

    @property
    def ledger(self) -> Ledger[M]:
        from rota.sdk.office import Ledger

        return Ledger(self._asks(), self._mode)

    @property
    def keys(self) -> Keys[M]:
        from rota.sdk.office import Keys

        return Keys(self._asks(), self._mode)
