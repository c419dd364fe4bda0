"""One replica, built from settings: connections, services, one listener.

Startup: connections open first (a wrong login or schema fails before anything runs; a server that does not answer is
retried for `service.start_timeout`), then services start in order, the listener first, so that `/health` answers from
the beginning. Shutdown: services stop in reverse order, and connections close last. Every replica may run every
service: leases and row locks in PostgreSQL serialise work that must happen once.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import structlog
from redis.asyncio import Redis

from rota.accounting.maintenance import AccountingMaintenance
from rota.accounting.service import AccountingService
from rota.agents.job_agents import job_agents_loader
from rota.agents.membership import AgentMembership
from rota.agents.repository import AgentRepository
from rota.agents.scheduler import AgentScheduler
from rota.engine.admission.decision import AdmissionGate, AllowAll, DeferAll
from rota.engine.admission.policy_call import kernel_timeout_s
from rota.engine.backends import Backends
from rota.engine.completion.publisher import CompletionPublisher
from rota.engine.engine import Engine, store_target
from rota.engine.events.history import HistoryWatcher
from rota.engine.events.sink import DiscardedEvents
from rota.engine.resubmission.resubmitter import Resubmitter
from rota.engine.submission.submitter import Submitter
from rota.infra import redis as redis_infra
from rota.infra.blob_store import BlobStore
from rota.infra.lease import Leases
from rota.infra.nats import Bus, NatsTarget
from rota.infra.outbox import OutboxRelay
from rota.infra.postgres import Database, PostgresTarget, check_current
from rota.infra.redis import RedisTarget
from rota.infra.replica import replica_name
from rota.infra.service import Service, Supervisor, run_until_signalled
from rota.infra.service.listener import HttpListener, TlsFiles
from rota.model.errors import InvalidSetting, RotaError, Unavailable
from rota.model.policy.decision import Kernel
from rota.model.policy.outputs import OutputScanMode
from rota.model.settings import RedisPurpose, Settings, redis_for
from rota.policy import enabled_flag, factory
from rota.policy.kernel import LocalKernel, PolicyKernel
from rota.policy.output.checker import (
    ContentChecker,
    FileOutputPolicySource,
    KernelContentChecker,
    OutputPolicySource,
    default_output_policy,
    remote_output_policy,
)
from rota.queue import MaintenanceIntervals, Queue, QueueMaintenance
from rota.workflow.advance_transaction import AdvanceTransaction
from rota.workflow.definitions import Definitions
from rota.workflow.executor import RunExecutor
from rota.workflow.notifier import UnpublishedRuns
from rota.workflow.recovery.reconciler import WorkflowReconciler
from rota.workflow.redis_mirror.publisher import MirrorPublisher
from rota.workflow.redis_mirror.reconciler import MirrorReconciler
from rota.workflow.redis_mirror.sagas import SagaMirror
from rota.workflow.redis_mirror.timers import TimerMirror
from rota.workflow.run_commands import RunCommands
from rota.workflow.run_events import RunEventPublisher
from rota.workflow.run_history import RunHistorySource
from rota.workflow.run_publisher import PublishedRuns
from rota.workflow.sagas import Sagas

log = structlog.get_logger(__name__)

SERVERS = ("postgres", "redis", "nats")
CONNECT_RETRY_INTERVAL_S = 1.0


class ServerUrls(msgspec.Struct, frozen=True):
    """URLs of the three servers."""

    postgres: str
    redis: str
    nats: str

    @classmethod
    def from_settings(cls, settings: Settings) -> ServerUrls:
        """The URLs of `settings`; all three must be set."""
        urls = configured_urls(settings)
        missing = [f"{name}.url" for name in SERVERS if name not in urls]
        if missing:
            raise InvalidSetting(
                f"{' and '.join(missing)} must be set to run a replica on your own servers: set them, "
                "or use `rota up`, which runs all three on this machine."
            )
        return cls(**urls)


def configured_urls(settings: Settings) -> dict[str, str]:
    """The servers that have a URL."""
    urls = {name: getattr(settings, name).url for name in SERVERS}
    return {name: url for name, url in urls.items() if url}


class Replica:
    """Open connections and the services that use them."""

    def __init__(
        self,
        settings: Settings,
        urls: ServerUrls,
        backends: Backends,
        agents: Redis,
        kernel: Kernel | None = None,
    ) -> None:
        self.settings = settings
        self.urls = urls
        self.database, self.redis, self.bus = database, redis, bus = backends.database, backends.redis, backends.bus
        self.accounting, self.queue = backends.accounting, backends.queue
        self.leases = backends.leases
        """One for all services, so that their leases are renewed in one statement."""
        self.agents = agents
        self.kernel = kernel
        self.engine = Engine(settings, backends, kernel, build_output_checks(settings, kernel, redis))
        mirrors = self._build_mirrors()
        self.workflows = self._build_workflows(mirrors)
        self.run_histories = HistoryWatcher(RunHistorySource(database), self.engine.event_stream)
        self.supervisor = Supervisor(drain_budget_s=settings.service.drain_timeout)
        self.listener = HttpListener(
            self.supervisor, host=settings.listen.host, port=settings.listen.port, tls=listen_tls(settings)
        )
        self._add_health_checks()
        self.supervisor.add(
            self.listener.service,
            Service("outbox_relay", OutboxRelay(database, bus).run),
            Service("books", AccountingMaintenance(self.accounting, self.leases, settings.accounting).run),
            Service("queue", self._queue_maintenance().run),
            *(kernel.services(database) if isinstance(kernel, PolicyKernel) else ()),
            *self.engine.services(),
            Service("agents", self._build_agents(agents).run),
            Service("workflows", self.workflows.advancer.run),
            Service("run_histories", self.run_histories.run),
            *self._workflow_maintenance(mirrors),
        )

    @classmethod
    @asynccontextmanager
    async def open(cls, settings: Settings, urls: ServerUrls) -> AsyncIterator[Replica]:
        async with AsyncExitStack() as closing:
            database = await Database.open(postgres_target(settings, urls.postgres))
            closing.push_async_callback(database.close)
            await check_current(database)
            redis = redis_infra.connect(redis_target(settings, urls.redis))
            closing.push_async_callback(redis.aclose)
            await redis_infra.check_server(redis)
            accounting = await closing.enter_async_context(open_accounting(settings, database, urls.redis))
            bus = await Bus.connect(nats_target(settings, urls.nats))
            closing.push_async_callback(bus.close)
            agents = redis_infra.connect(redis_target(settings, urls.redis, "agents"))
            closing.push_async_callback(agents.aclose)
            kernel = build_policy_kernel(settings, redis)
            if isinstance(kernel, PolicyKernel):
                closing.push_async_callback(kernel.close)
            await enabled_flag.set_enabled(database, asks=kernel is not None)
            store = BlobStore(database, store_target(settings))
            backends = Backends(database, redis, bus, accounting, Queue(database), store, Leases(database))
            replica = cls(settings, urls, backends, agents, kernel)
            if replica.engine.scanner is not None:
                closing.push_async_callback(replica.engine.scanner.close)
            await replica.engine.declare()
            await replica.engine.warm_up()
            yield replica

    def _queue_maintenance(self) -> QueueMaintenance:
        intervals = MaintenanceIntervals(failed_retention_s=self.settings.retention.failed_frames)
        return QueueMaintenance(self.queue, self.leases, self.accounting.bar_unbooked, intervals)

    def _build_agents(self, client: Redis) -> AgentScheduler:
        """Agents that submit a job, which need no user code."""
        loader = job_agents_loader(AgentRepository(self.database, self.leases.owner), self.engine.submitter)
        publish_event = self.engine.event_publisher.emit
        membership = AgentMembership(self.leases, crowd="servers")
        return AgentScheduler(self.settings, self.database, client, loader, membership, publish_event)

    def _build_mirrors(self) -> MirrorPublisher:
        """The Redis mirror of timers and sagas."""
        timers = TimerMirror(self.database, self.redis, Definitions(self.database))
        return MirrorPublisher(timers, SagaMirror(self.database, self.redis, self.settings.saga.lock_ttl))

    def _build_workflows(self, mirror: MirrorPublisher) -> RunCommands:
        """The replica that ends a job also advances the run it belongs to."""
        engine, settings = self.engine, self.settings
        notifier = PublishedRuns(engine.events, RunEventPublisher(engine.event_publisher), mirror, engine.canceller)
        policy_timeout_s = kernel_timeout_s(self.settings.safety)
        sagas = Sagas(self.database, self.queue.dead_letters, notifier, self.kernel, policy_timeout_s)
        transaction = AdvanceTransaction(engine.submitter, mirror.timers.definitions, sagas)
        executor = RunExecutor(self.database, transaction, notifier, workflow=settings.workflow, saga=settings.saga)
        engine.approver.subjects["step"] = transaction.approving
        engine.completions.listeners.append(executor.on_jobs_ended)
        if engine.scanner is not None:
            engine.scanner.listeners.append(executor.wake)
        return RunCommands(executor)

    def _workflow_maintenance(self, mirror: MirrorPublisher) -> Sequence[Service]:
        """The Redis mirror, and the reconciler that repairs stuck runs."""
        executor, settings = self.workflows.advancer, self.settings
        poller = MirrorReconciler(
            self.leases, mirror.timers, mirror.sagas, executor.advancing.sagas, settings.workflow.delay
        )
        reconciler = WorkflowReconciler(self.leases, executor, settings.retention)
        return (
            Service("workflow_mirror", mirror.run),
            Service("workflow_poller", poller.run),
            Service("workflow_reconciler", reconciler.run),
        )

    def _add_health_checks(self) -> None:
        checks = self.listener.checks
        checks.add("postgres", lambda: check_current(self.database))
        checks.add("redis", lambda: redis_infra.health(self.redis))
        checks.add("nats", self.bus.check)

    @property
    def listen_url(self) -> str:
        """URL of `/health`, `/ready`, `/metrics` and the API; known once the listener is ready."""
        return self.listener.url

    async def run(self) -> int:
        """Run until a signal or a failure; returns the exit status of the process."""
        return await run_until_signalled(self.supervisor)


async def serve(
    settings: Settings, urls: ServerUrls, extra_services: Callable[[Replica], Iterable[Service]] = lambda _replica: ()
) -> int:
    """Run a replica together with services of higher layers, such as the HTTP API."""
    async with AsyncExitStack() as closing:
        replica = await _open_with_retry(settings, urls, closing)
        replica.supervisor.add(*extra_services(replica))
        # Modules loaded by now live as long as the process: exclude them from every later collection.
        gc.collect()
        gc.freeze()
        # Each request makes thousands of containers without cycles: collect less often than the default of 700 objects.
        gc.set_threshold(20_000, 20, 50)
        return await replica.run()


async def _open_with_retry(settings: Settings, urls: ServerUrls, closing: AsyncExitStack) -> Replica:
    """After a power cut all servers start together: retry those that do not answer, fail on those that refuse."""
    give_up_at = time.monotonic() + settings.service.start_timeout
    while True:
        try:
            return await closing.enter_async_context(Replica.open(settings, urls))
        except Unavailable as error:
            if time.monotonic() >= give_up_at:
                raise
            log.warning("server_connect_retry", code=error.code, because=error.sentence)
        await asyncio.sleep(CONNECT_RETRY_INTERVAL_S)


def listen_tls(settings: Settings) -> TlsFiles | None:
    options = settings.listen
    return TlsFiles(options.tls_cert, options.tls_key) if options.tls_cert and options.tls_key else None


def postgres_target(settings: Settings, url: str) -> PostgresTarget:
    options = settings.postgres
    return PostgresTarget(
        url=url,
        pool_min=options.pool_min,
        pool_max=options.pool_max,
        connect_timeout_s=options.connect_timeout,
        acquire_timeout_s=options.acquire_timeout,
        statement_timeout_s=options.statement_timeout,
        lock_timeout_s=options.lock_timeout,
        idle_in_transaction_s=options.idle_in_transaction_timeout,
    )


def nats_target(settings: Settings, url: str) -> NatsTarget:
    options = settings.nats
    return NatsTarget(
        url=url,
        prefix=options.prefix,
        connect_timeout_s=options.connect_timeout,
        publish_timeout_s=options.publish_timeout,
        name=replica_name(),
    )


def redis_target(settings: Settings, url: str | None, user: RedisPurpose = "scheduler") -> RedisTarget:
    use = redis_for(settings, user, url)
    return RedisTarget(**msgspec.structs.asdict(use), client_name=replica_name())


@asynccontextmanager
async def open_accounting(
    settings: Settings, database: Database, redis_url: str | None
) -> AsyncIterator[AccountingService]:
    """Accounting with its own Redis connection, which may be down; none if `accounting.redis` is disabled."""
    remember_s = settings.accounting.managed_shows_ttl
    if not settings.accounting.redis.enabled:
        yield AccountingService(database, None, remember_s=remember_s)
        return
    client = redis_infra.connect(redis_target(settings, redis_url, "accounting"))
    try:
        yield AccountingService(database, client, remember_s=remember_s)
    finally:
        await client.aclose()


def build_policy_kernel(settings: Settings, redis: Redis | None = None) -> Kernel | None:
    """The policy engine of this installation; None: every job may run."""
    return factory.open_kernel(settings, redis)


def build_gate(settings: Settings) -> AdmissionGate:
    """The gate for submitters without a replica: with a policy, jobs are written as PENDING and servers decide."""
    return DeferAll() if factory.has_policy(settings) else AllowAll()


def build_output_checks(
    settings: Settings, kernel: Kernel | None, redis: Redis | None
) -> tuple[OutputPolicySource, ContentChecker | None] | None:
    """The output policy and the content checker; None: outputs are not checked."""
    options = settings.output_policy
    if not options.enabled:
        return None
    otherwise = OutputScanMode.HOLD if options.fail_mode == "closed" else OutputScanMode.PASS
    if isinstance(kernel, LocalKernel):
        return FileOutputPolicySource(kernel.snapshots, otherwise), None
    if settings.safety_kernel.addr:
        from rota.policy.grpc.client import RemoteOutputKernel

        unknown = remote_output_policy(otherwise)
        return lambda: unknown, KernelContentChecker(RemoteOutputKernel(settings, redis))
    rules = default_output_policy(otherwise)
    return lambda: rules, None


def build_submitter(settings: Settings, database: Database) -> Submitter:
    """For processes without a replica; the same gate as the engine's submitter, so no job bypasses admission."""
    return Submitter(database, DiscardedEvents(), gate=build_gate(settings))


def build_completions(database: Database) -> CompletionPublisher:
    """For processes without a replica, which end no booked frames: nothing is released in Redis or published."""
    return CompletionPublisher(database, AccountingService(database, None), DiscardedEvents())


def build_run_commands(settings: Settings, queue: Queue) -> RunCommands:
    """For processes without a replica: the servers advance the runs that it starts."""
    database, notifier = queue.database, UnpublishedRuns()
    sagas = Sagas(database, queue.dead_letters, notifier)
    transaction = AdvanceTransaction(build_submitter(settings, database), Definitions(database), sagas)
    return RunCommands(RunExecutor(database, transaction, notifier, workflow=settings.workflow, saga=settings.saga))


def build_resubmitter(settings: Settings, queue: Queue) -> Resubmitter:
    store = BlobStore(queue.database, store_target(settings))
    return Resubmitter(queue.database, queue, build_submitter(settings, queue.database), store)


async def check_server(settings: Settings, name: str, url: str) -> None:
    """Raise unless the server at `url` answers and fits its role; changes nothing on it."""
    match name:
        case "postgres":
            await (await Database.open(postgres_target(settings, url))).close()
        case "redis":
            client = redis_infra.connect(redis_target(settings, url))
            try:
                await redis_infra.check_server(client)
            finally:
                await client.aclose()
        case "nats":
            await (await Bus.connect(nats_target(settings, url))).close()


async def server_problem(settings: Settings, name: str, url: str) -> str | None:
    """What is wrong with the server at `url`, as a sentence; None if it answers."""
    try:
        await check_server(settings, name, url)
    except RotaError as error:
        return error.sentence
    return None
