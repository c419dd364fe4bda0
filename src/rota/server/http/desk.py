"""What handlers work with: the parts of a replica that faces use, and nothing else of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from redis.asyncio import Redis

from rota.accounting.books import Books
from rota.engine.approving import Approver
from rota.engine.ender import Ender
from rota.engine.events import Teller
from rota.engine.events_feed import Feed
from rota.engine.events_history import Histories
from rota.engine.explain import Explainer
from rota.engine.jobs import Jobs, Moment
from rota.engine.logs import Logs
from rota.engine.outcomes import OutcomeReader
from rota.engine.outputs_desk import OutputDesk
from rota.engine.reopen import Reopener
from rota.engine.submit import Submitter
from rota.engine.submit_together import Together
from rota.engine.watching import Watch
from rota.infra.postgres import Database
from rota.infra.store import Store
from rota.model.policy import Kernel
from rota.model.settings import Settings
from rota.placement.registry import Registry
from rota.placement.routing import Routing
from rota.queue import Queue
from rota.runtime import Replica, reopener_of
from rota.server.access import KeyCheck, Keys
from rota.server.http.streams import Streams
from rota.workflow.desk import Desk as Workflows
from rota.workflow.looking import Looking as Runs
from rota.workflow.watching import RunMoment


class Desk(msgspec.Struct, frozen=True, kw_only=True):
    settings: Settings
    database: Database
    submitter: Submitter
    together: Together
    jobs: Jobs
    outcomes: OutcomeReader
    outputs: OutputDesk
    logs: Logs
    store: Store
    watch: Watch
    runs_watch: Watch
    ender: Ender
    approver: Approver
    reopener: Reopener
    explainer: Explainer
    queue: Queue
    books: Books
    routing: Routing
    registry: Registry
    keys: Keys
    until_stopping: Callable[[], Awaitable[None]]
    """For answers that last: they end when the server does."""
    teller: Teller
    feed: Feed
    histories: Histories[Moment]
    run_histories: Histories[RunMoment]
    streams: Streams
    agents: Redis
    """Where the sets of agents are."""
    workflows: Workflows
    runs: Runs
    kernel: Kernel | None
    """Who decides whether jobs may run; None: they all may."""

    @classmethod
    def of(cls, replica: Replica, watch: Watch, runs_watch: Watch, streams: Streams, check: KeyCheck) -> Desk:
        engine, database = replica.engine, replica.database
        jobs = Jobs(database)
        return cls(
            settings=replica.settings,
            database=database,
            submitter=engine.submitter,
            together=Together(engine.submitter),
            jobs=jobs,
            outcomes=OutcomeReader(jobs, engine.store),
            outputs=OutputDesk(database, engine.store, replica.queue, engine.finisher),
            logs=Logs(database),
            store=engine.store,
            watch=watch,
            runs_watch=runs_watch,
            ender=engine.ender,
            approver=engine.approver,
            reopener=reopener_of(replica.settings, replica.queue),
            explainer=engine.explainer,
            queue=replica.queue,
            books=replica.books,
            routing=engine.routing,
            registry=engine.registry,
            keys=Keys(database, check.forget),
            until_stopping=replica.supervisor.until_stopping,
            teller=engine.teller,
            feed=engine.feed,
            histories=engine.histories,
            run_histories=replica.run_histories,
            streams=streams,
            agents=replica.agents,
            workflows=replica.workflows,
            runs=Runs(database),
            kernel=replica.kernel,
        )
