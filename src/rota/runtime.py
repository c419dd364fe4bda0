"""One running replica, built out of settings: connections, services, one listener.

Order of life: connections open (a bad login or schema is told before anything runs; a server that does not answer is
waited for, `service.start_timeout` long), then services start in order, the listener first, so that `/health` answers
from the beginning; they end in reverse, and connections close last. Every replica may run every service: what must be
done once is decided by leases and row locks in PostgreSQL.
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

from rota.accounting import allocations
from rota.accounting.maintenance import AccountingMaintenance as BooksUpkeep
from rota.accounting.service import AccountingService
from rota.agents.job_agents import job_agents_loader
from rota.agents.repository import AgentRepository
from rota.agents.scheduler import AgentScheduler
from rota.engine.admission.decision import AdmissionGate, AllowAll, DeferAll
from rota.engine.engine import Engine, store_target
from rota.engine.events.history import HistoryWatcher
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
from rota.model.errors import InvalidSetting, RedisUnavailable, RotaError, Unavailable
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
from rota.queue import MaintenanceIntervals, Queue
from rota.queue import QueueMaintenance as QueueUpkeep
from rota.workflow.advance_transaction import AdvanceTransaction
from rota.workflow.definitions import Definitions
from rota.workflow.executor import RunExecutor
from rota.workflow.recovery.reconciler import WorkflowReconciler
from rota.workflow.redis_mirror.publisher import MirrorPublisher
from rota.workflow.redis_mirror.reconciler import MirrorReconciler
from rota.workflow.redis_mirror.sagas import SagaMirror
from rota.workflow.redis_mirror.timers import TimerMirror
from rota.workflow.run_commands import RunCommands
from rota.workflow.run_events import RunEventPublisher
from rota.workflow.run_history import RunHistorySource
from rota.workflow.sagas import Sagas

log = structlog.get_logger(__name__)

SERVERS = ("postgres", "redis", "nats")
CONNECT_RETRY_INTERVAL_S = 1.0


class ServerUrls(msgspec.Struct, frozen=True):
    """Where the three servers are."""

    postgres: str
    redis: str
    nats: str

    @classmethod
    def from_settings(cls, settings: Settings) -> ServerUrls:
        """The URLs of `settings`; all three must be set."""
        named = configured_urls(settings)
        missing = [f"{name}.url" for name in SERVERS if name not in named]
        if missing:
            raise InvalidSetting(
                f"{' and '.join(missing)} must be set to run a replica against servers of yours; "
                "`rota up` runs all three on this machine."
            )
        return cls(**named)


def configured_urls(settings: Settings) -> dict[str, str]:
    """The servers that are named by a URL."""
    urls = {name: getattr(settings, name).url for name in SERVERS}
    return {name: url for name, url in urls.items() if url}


class Replica:
    """Open connections and the services that use them."""

    def __init__(
        self,
        settings: Settings,
        urls: ServerUrls,
        database: Database,
        redis: Redis,
        bus: Bus,
        books: AccountingService,
        agents: Redis,
        kernel: Kernel | None = None,
    ) -> None:
        self.settings = settings
        self.urls = urls
        self.database = database
        self.redis = redis
        self.bus = bus
        self.books = books
        self.agents = agents
        self.kernel = kernel
        self.queue = Queue(database)
        looks = build_output_checks(settings, kernel, redis)
        self.engine = Engine(settings, database, redis, bus, books, self.queue, kernel, looks)
        self.supervisor = Supervisor(drain_budget_s=settings.service.drain_timeout)
        self.listener = HttpListener(
            self.supervisor, host=settings.listen.host, port=settings.listen.port, tls=listen_tls(settings)
        )
        self._add_health_checks()
        self.supervisor.add(
            self.listener.service,
            Service("outbox_relay", OutboxRelay(database, bus).run),
            Service("books", BooksUpkeep(books, Leases(database), settings.accounting).run),
            Service("queue", self._queue_maintenance().run),
            *(kernel.services(database) if isinstance(kernel, PolicyKernel) else ()),
            *self.engine.services(),
            Service("agents", self._build_agents(agents).run),
            Service("workflows", self._build_workflows().run),
            Service("run_histories", self.run_histories.run),
            *self._workflow_maintenance(),
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
            books = await closing.enter_async_context(open_accounting(settings, database, urls.redis))
            bus = await Bus.connect(nats_target(settings, urls.nats))
            closing.push_async_callback(bus.close)
            agents = redis_infra.connect(redis_target(settings, urls.redis, "agents"))
            closing.push_async_callback(agents.aclose)
            kernel = build_policy_kernel(settings, redis)
            if isinstance(kernel, PolicyKernel):
                closing.push_async_callback(kernel.close)
            await enabled_flag.set_enabled(database, asks=kernel is not None)
            replica = cls(settings, urls, database, redis, bus, books, agents, kernel)
            if replica.engine.scanner is not None:
                closing.push_async_callback(replica.engine.scanner.close)
            await replica.engine.declare()
            await replica.engine.warm_up()
            yield replica

    def _queue_maintenance(self) -> QueueUpkeep:
        async def bury(tokens: Sequence[int]) -> set[int]:
            return await tombstone_unbooked(self.books, tokens)

        pace = MaintenanceIntervals(failed_retention_s=self.settings.retention.failed_frames)
        return QueueUpkeep(self.queue, Leases(self.database), bury, pace)

    def _build_agents(self, client: Redis) -> AgentScheduler:
        """Those that submit a job, which need nobody's code."""
        leases = Leases(self.database)
        declared = job_agents_loader(AgentRepository(self.database, leases.owner), self.engine.submitter)
        tell = self.engine.teller.emit
        return AgentScheduler(self.settings, self.database, client, declared, leases=leases, crowd="servers", tell=tell)

    def _build_workflows(self) -> RunExecutor:
        """Runs are advanced by whoever ends their jobs, at once."""
        sagas = Sagas(self.database, self.queue.dead_letters, self.kernel)
        advancing = AdvanceTransaction(self.engine.submitter, Definitions(self.database), sagas)
        wanted = self.settings
        advancer = RunExecutor(self.database, advancing, workflow=wanted.workflow, saga=wanted.saga)
        advancer.stop_job = self.engine.ender.continue_termination
        advancer.on_asked = self.engine.gatekeeper.approval_requests.on_requested
        telling = RunEventPublisher(self.engine.teller)
        advancer.on_happened, advancer.on_undone = telling.publish_advances, telling.publish_sagas
        self.engine.approver.subjects["step"] = advancing.approving
        self.engine.finisher.listeners.append(advancer.on_jobs_ended)
        if self.engine.scanner is not None:
            self.engine.scanner.on_settled = advancer.wake
        self.workflows = RunCommands(advancer)
        self.run_histories = HistoryWatcher(RunHistorySource(self.database), self.engine.feed)
        return advancer

    def _workflow_maintenance(self) -> Sequence[Service]:
        """What Redis shows of timers and sagas, and the net below them."""
        advancer, wanted = self.workflows.advancer, self.settings
        sagas = advancer.advancing.sagas
        timers = TimerMirror(self.database, self.redis, self.workflows.definitions)
        stacks = SagaMirror(self.database, self.redis, wanted.saga.lock_ttl)
        mirror = MirrorPublisher(timers, stacks)
        advancer.on_done = mirror.on_advanced
        sagas.on_change = mirror.on_sagas_changed
        poller = MirrorReconciler(Leases(self.database), timers, stacks, sagas, wanted.workflow.delay)
        net = WorkflowReconciler(Leases(self.database), advancer, wanted.retention)
        return (
            Service("workflow_mirror", mirror.run),
            Service("workflow_poller", poller.run),
            Service("workflow_reconciler", net.run),
        )

    def _add_health_checks(self) -> None:
        checks = self.listener.checks
        checks.add("postgres", lambda: check_current(self.database))
        checks.add("redis", lambda: redis_infra.health(self.redis))
        checks.add("nats", self.bus.check)

    @property
    def listen_url(self) -> str:
        """Where `/health`, `/ready`, `/metrics` and the API answer; known once the listener is ready."""
        return self.listener.url

    async def run(self) -> int:
        """Until a signal or a failure; the exit status of the process."""
        return await run_until_signalled(self.supervisor)


async def serve(
    settings: Settings, urls: ServerUrls, faces: Callable[[Replica], Iterable[Service]] = lambda _replica: ()
) -> int:
    """Run a replica with what else it shows to the outside, which lies above this module."""
    async with AsyncExitStack() as closing:
        replica = await _open_with_retry(settings, urls, closing)
        replica.supervisor.add(*faces(replica))
        # What is loaded by now stays: the collector need not look at it each time jobs have come and gone.
        gc.collect()
        gc.freeze()
        return await replica.run()


async def _open_with_retry(settings: Settings, urls: ServerUrls, closing: AsyncExitStack) -> Replica:
    """After a power cut everything starts at once: who does not answer yet is waited for, who refuses us is told."""
    give_up_at = time.monotonic() + settings.service.start_timeout
    while True:
        try:
            return await closing.enter_async_context(Replica.open(settings, urls))
        except Unavailable as error:
            if time.monotonic() >= give_up_at:
                raise
            log.warning("start_waits", code=error.code, because=error.sentence)
        await asyncio.sleep(CONNECT_RETRY_INTERVAL_S)


def listen_tls(settings: Settings) -> TlsFiles | None:
    wanted = settings.listen
    return TlsFiles(wanted.tls_cert, wanted.tls_key) if wanted.tls_cert and wanted.tls_key else None


def postgres_target(settings: Settings, url: str) -> PostgresTarget:
    wanted = settings.postgres
    return PostgresTarget(
        url=url,
        pool_min=wanted.pool_min,
        pool_max=wanted.pool_max,
        connect_timeout_s=wanted.connect_timeout,
        acquire_timeout_s=wanted.acquire_timeout,
        statement_timeout_s=wanted.statement_timeout,
        lock_timeout_s=wanted.lock_timeout,
        idle_in_transaction_s=wanted.idle_in_transaction_timeout,
    )


def nats_target(settings: Settings, url: str) -> NatsTarget:
    wanted = settings.nats
    return NatsTarget(
        url=url,
        prefix=wanted.prefix,
        connect_timeout_s=wanted.connect_timeout,
        publish_timeout_s=wanted.publish_timeout,
        name=replica_name(),
    )


def redis_target(settings: Settings, url: str | None, user: RedisPurpose = "scheduler") -> RedisTarget:
    use = redis_for(settings, user, url)
    return RedisTarget(**msgspec.structs.asdict(use), client_name=replica_name())


@asynccontextmanager
async def open_accounting(
    settings: Settings, database: Database, redis_url: str | None
) -> AsyncIterator[AccountingService]:
    """The books with a Redis connection of their own, which need not answer yet; without one where that is off."""
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
    """Who decides whether a job may run, for all replicas and faces of this installation; None: every job may."""
    return factory.open_kernel(settings, redis)


def build_gate(settings: Settings) -> AdmissionGate:
    """Of who submits without a replica: where there is a policy, jobs are written as PENDING and servers ask."""
    return DeferAll() if factory.has_policy(settings) else AllowAll()


def build_output_checks(
    settings: Settings, kernel: Kernel | None, redis: Redis | None
) -> tuple[OutputPolicySource, ContentChecker | None] | None:
    """By which rules outputs are looked at, and who looks into them; None: nobody does."""
    wanted = settings.output_policy
    if not wanted.enabled:
        return None
    otherwise = OutputScanMode.HOLD if wanted.fail_mode == "closed" else OutputScanMode.PASS
    if isinstance(kernel, LocalKernel):
        return FileOutputPolicySource(kernel.snapshots, otherwise), None
    if settings.safety_kernel.addr:
        from rota.policy.client import RemoteOutputKernel

        unknown = remote_output_policy(otherwise)
        return lambda: unknown, KernelContentChecker(RemoteOutputKernel(settings, redis))
    rules = default_output_policy(otherwise)
    return lambda: rules, None


def build_submitter(settings: Settings, database: Database) -> Submitter:
    """For a face without a replica. Every job comes in by this or by that of the engine: behind the same gate."""
    return Submitter(database, gate=build_gate(settings))


def build_run_commands(settings: Settings, queue: Queue) -> RunCommands:
    """For a face without a replica: what it starts servers advance."""
    database = queue.database
    sagas = Sagas(database, queue.dead_letters)
    advancing = AdvanceTransaction(build_submitter(settings, database), Definitions(database), sagas)
    return RunCommands(RunExecutor(database, advancing, workflow=settings.workflow, saga=settings.saga))


def build_resubmitter(settings: Settings, queue: Queue) -> Resubmitter:
    store = BlobStore(queue.database, store_target(settings))
    return Resubmitter(queue.database, queue, build_submitter(settings, queue.database), store)


async def tombstone_unbooked(books: AccountingService, tokens: Sequence[int]) -> set[int]:
    """Those of a dead dispatcher's tokens that have no proc row and, from here on, cannot get one in any show.

    A claim does not say whose frames it holds, so they are buried everywhere; that is rare, and graves are pruned. It
    may have died with tokens booked in Redis alone: Redis forgets them, or, if it is away, the recount finds them.
    """
    left = set(tokens)
    for show in await books.admin.shows():
        left = await allocations.tombstone(books.database, show.id, sorted(left)) if left else left
    try:
        await books.release_tombstoned(sorted(left))
    except RedisUnavailable as away:
        log.warning("tokens_not_forgotten", tokens=len(left), reason=away.sentence, remedy="the recount mends it")
    return left


async def check_server(settings: Settings, name: str, url: str) -> None:
    """Raises unless the server at `url` answers and is fit for its role; changes nothing in it."""
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
    """What is wrong with the server at `url`, in a sentence; None when it answers."""
    try:
        await check_server(settings, name, url)
    except RotaError as error:
        return error.sentence
    return None
