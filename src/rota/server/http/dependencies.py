"""The parts of a replica that HTTP handlers use."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from redis.asyncio import Redis

from rota.accounting.service import AccountingService
from rota.api.jobs import JobHistoryEntry
from rota.engine.admission.approvals import Approver
from rota.engine.completion.canceller import JobCanceller
from rota.engine.events.history import HistoryWatcher
from rota.engine.events.publisher import EventPublisher
from rota.engine.events.subscriptions import EventStream
from rota.engine.explain.explainer import Explainer
from rota.engine.outputs.review import OutputReview
from rota.engine.queries.jobs import JobQueries
from rota.engine.queries.logs import LogReader
from rota.engine.queries.results import FrameResultReader
from rota.engine.queries.wait_for_end import EndWaiter
from rota.engine.resubmission.resubmitter import Resubmitter
from rota.engine.submission.batcher import SubmissionBatcher
from rota.engine.submission.submitter import Submitter
from rota.infra.blob_store import BlobStore
from rota.infra.postgres import Database
from rota.model.policy.decision import Kernel
from rota.model.settings import Settings
from rota.placement.registry import WorkerRegistry
from rota.placement.route_store import RouteStore
from rota.queue import Queue
from rota.runtime import Replica, build_resubmitter
from rota.server.access import ApiKeyStore, KeyCheck, PrincipalStore
from rota.server.http.open_streams import StreamRegistry
from rota.workflow.run_commands import RunCommands as Workflows
from rota.workflow.run_history import RunHistoryEntry
from rota.workflow.run_queries import RunQueries as Runs


class HttpDependencies(msgspec.Struct, frozen=True, kw_only=True):
    settings: Settings
    database: Database
    submitter: Submitter
    together: SubmissionBatcher
    jobs: JobQueries
    outcomes: FrameResultReader
    outputs: OutputReview
    logs: LogReader
    store: BlobStore
    watch: EndWaiter
    runs_watch: EndWaiter
    ender: JobCanceller
    approver: Approver
    reopener: Resubmitter
    explainer: Explainer
    queue: Queue
    books: AccountingService
    routing: RouteStore
    registry: WorkerRegistry
    keys: ApiKeyStore
    principals: PrincipalStore
    until_stopping: Callable[[], Awaitable[None]]
    """For long responses: they end when the server stops."""
    teller: EventPublisher
    feed: EventStream
    histories: HistoryWatcher[JobHistoryEntry]
    run_histories: HistoryWatcher[RunHistoryEntry]
    streams: StreamRegistry
    agents: Redis
    """The Redis that holds the agents' sets."""
    workflows: Workflows
    runs: Runs
    kernel: Kernel | None
    """The policy engine; None: every job is allowed."""

    @classmethod
    def from_replica(
        cls, replica: Replica, watch: EndWaiter, runs_watch: EndWaiter, streams: StreamRegistry, check: KeyCheck
    ) -> HttpDependencies:
        engine, database = replica.engine, replica.database
        jobs = JobQueries(database)
        return cls(
            settings=replica.settings,
            database=database,
            submitter=engine.submitter,
            together=SubmissionBatcher(engine.submitter),
            jobs=jobs,
            outcomes=FrameResultReader(jobs, engine.store),
            outputs=OutputReview(database, engine.store, replica.queue, engine.completions),
            logs=LogReader(database),
            store=engine.store,
            watch=watch,
            runs_watch=runs_watch,
            ender=engine.canceller,
            approver=engine.approver,
            reopener=build_resubmitter(replica.settings, replica.queue),
            explainer=engine.explainer,
            queue=replica.queue,
            books=replica.accounting,
            routing=engine.routing,
            registry=engine.registry,
            keys=ApiKeyStore(database, check.invalidate),
            principals=PrincipalStore(database, check.invalidate),
            until_stopping=replica.supervisor.until_stopping,
            teller=engine.event_publisher,
            feed=engine.event_stream,
            histories=engine.histories,
            run_histories=replica.run_histories,
            streams=streams,
            agents=replica.agents,
            workflows=replica.workflows,
            runs=Runs(database),
            kernel=replica.kernel,
        )
