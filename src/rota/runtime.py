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

from rota.accounting import procs
from rota.accounting.books import Books
from rota.accounting.upkeep import Upkeep as BooksUpkeep
from rota.agents.jobs import of_servers
from rota.agents.records import Records
from rota.agents.scheduler import Agents
from rota.engine.engine import Engine, store_target
from rota.engine.events_history import Histories
from rota.engine.gate import AllowAll, AskLater, Gate
from rota.engine.reopen import Reopener
from rota.engine.submit import Submitter
from rota.infra import redis as redis_infra
from rota.infra.lease import Leases
from rota.infra.nats import Bus, NatsTarget
from rota.infra.outbox import Relay
from rota.infra.postgres import Database, PostgresTarget, check_current
from rota.infra.redis import RedisTarget
from rota.infra.replica import replica_name
from rota.infra.service import Service, Supervisor, run_until_signalled
from rota.infra.service.listener import Listener, Tls
from rota.infra.store import Store
from rota.model.errors import InvalidSetting, RedisUnavailable, RotaError, Unavailable
from rota.model.output import Mode
from rota.model.policy import Kernel
from rota.model.settings import RedisUser, Settings, redis_for
from rota.policy import guard, opening
from rota.policy.kernel import LocalKernel, PolicyKernel
from rota.policy.output.asking import ByKernel, Checker, OfFile, Source, elsewhere, of_nobody
from rota.queue import Pace, Queue
from rota.queue import Upkeep as QueueUpkeep
from rota.workflow.advancer import Advancer
from rota.workflow.advancing import Advancing
from rota.workflow.definitions import Definitions
from rota.workflow.desk import Desk
from rota.workflow.mirror import Mirror
from rota.workflow.poller import Poller
from rota.workflow.reconciler import Reconciler
from rota.workflow.saga_mirror import SagaMirror
from rota.workflow.sagas import Sagas
from rota.workflow.telling import RunTeller
from rota.workflow.timer_index import TimerIndex
from rota.workflow.watching import OfRuns

log = structlog.get_logger(__name__)

SERVERS = ("postgres", "redis", "nats")
ASK_AGAIN_S = 1.0


class Urls(msgspec.Struct, frozen=True):
    """Where the three servers are."""

    postgres: str
    redis: str
    nats: str

    @classmethod
    def of(cls, settings: Settings) -> Urls:
        """The URLs of `settings`; all three must be set."""
        named = named_urls(settings)
        missing = [f"{name}.url" for name in SERVERS if name not in named]
        if missing:
            raise InvalidSetting(
                f"{' and '.join(missing)} must be set to run a replica against servers of yours; "
                "`rota up` runs all three on this machine."
            )
        return cls(**named)


def named_urls(settings: Settings) -> dict[str, str]:
    """The servers that are named by a URL."""
    urls = {name: getattr(settings, name).url for name in SERVERS}
    return {name: url for name, url in urls.items() if url}


class Replica:
    """Open connections and the services that use them."""

    def __init__(
        self,
        settings: Settings,
        urls: Urls,
        database: Database,
        redis: Redis,
        bus: Bus,
        books: Books,
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
        looks = outputs_of(settings, kernel, redis)
        self.engine = Engine(settings, database, redis, bus, books, self.queue, kernel, looks)
        self.supervisor = Supervisor(drain_budget_s=settings.service.drain_timeout)
        self.listener = Listener(
            self.supervisor, host=settings.listen.host, port=settings.listen.port, tls=listen_tls(settings)
        )
        self._check_servers()
        self.supervisor.add(
            self.listener.service,
            Service("outbox_relay", Relay(database, bus).run),
            Service("books", BooksUpkeep(books, Leases(database), settings.accounting).run),
            Service("queue", self._queue_upkeep().run),
            *(kernel.services(database) if isinstance(kernel, PolicyKernel) else ()),
            *self.engine.services(),
            Service("agents", self._agents(agents).run),
            Service("workflows", self._workflows().run),
            Service("run_histories", self.run_histories.run),
            *self._workflow_upkeep(),
        )

    @classmethod
    @asynccontextmanager
    async def open(cls, settings: Settings, urls: Urls) -> AsyncIterator[Replica]:
        async with AsyncExitStack() as closing:
            database = await Database.open(postgres_target(settings, urls.postgres))
            closing.push_async_callback(database.close)
            await check_current(database)
            redis = redis_infra.connect(redis_target(settings, urls.redis))
            closing.push_async_callback(redis.aclose)
            await redis_infra.check_fit(redis)
            books = await closing.enter_async_context(opened_books(settings, database, urls.redis))
            bus = await Bus.connect(nats_target(settings, urls.nats))
            closing.push_async_callback(bus.close)
            agents = redis_infra.connect(redis_target(settings, urls.redis, "agents"))
            closing.push_async_callback(agents.aclose)
            kernel = policy_of(settings, redis)
            if isinstance(kernel, PolicyKernel):
                closing.push_async_callback(kernel.close)
            await guard.tell(database, asks=kernel is not None)
            replica = cls(settings, urls, database, redis, bus, books, agents, kernel)
            if replica.engine.scanner is not None:
                closing.push_async_callback(replica.engine.scanner.close)
            await replica.engine.declare()
            await replica.engine.warm_up()
            yield replica

    def _queue_upkeep(self) -> QueueUpkeep:
        async def bury(tokens: Sequence[int]) -> set[int]:
            return await never_booked(self.books, tokens)

        pace = Pace(failed_retention_s=self.settings.retention.failed_frames)
        return QueueUpkeep(self.queue, Leases(self.database), bury, pace)

    def _agents(self, client: Redis) -> Agents:
        """Those that submit a job, which need nobody's code."""
        leases = Leases(self.database)
        declared = of_servers(Records(self.database, leases.owner), self.engine.submitter)
        tell = self.engine.teller.tell
        return Agents(self.settings, self.database, client, declared, leases=leases, crowd="servers", tell=tell)

    def _workflows(self) -> Advancer:
        """Runs are advanced by whoever ends their jobs, at once."""
        sagas = Sagas(self.database, self.queue.dead_letters, self.kernel)
        advancing = Advancing(self.engine.submitter, Definitions(self.database), sagas)
        wanted = self.settings
        advancer = Advancer(self.database, advancing, workflow=wanted.workflow, saga=wanted.saga)
        advancer.stop_job = self.engine.ender.go_on
        advancer.on_asked = self.engine.gatekeeper.gated.on_requested
        telling = RunTeller(self.engine.teller)
        advancer.on_happened, advancer.on_undone = telling.advanced, telling.undone
        self.engine.approver.subjects["step"] = advancing.approving
        self.engine.finisher.listeners.append(advancer.heard)
        if self.engine.scanner is not None:
            self.engine.scanner.on_settled = advancer.wake
        self.workflows = Desk(advancer)
        self.run_histories = Histories(OfRuns(self.database), self.engine.feed)
        return advancer

    def _workflow_upkeep(self) -> Sequence[Service]:
        """What Redis shows of timers and sagas, and the net below them."""
        advancer, wanted = self.workflows.advancer, self.settings
        sagas = advancer.advancing.sagas
        timers = TimerIndex(self.database, self.redis, self.workflows.definitions)
        stacks = SagaMirror(self.database, self.redis, wanted.saga.lock_ttl)
        mirror = Mirror(timers, stacks)
        advancer.on_done = mirror.heard
        sagas.on_change = mirror.changed
        poller = Poller(Leases(self.database), timers, stacks, sagas, wanted.workflow.delay)
        net = Reconciler(Leases(self.database), advancer, wanted.retention)
        return (
            Service("workflow_mirror", mirror.run),
            Service("workflow_poller", poller.run),
            Service("workflow_reconciler", net.run),
        )

    def _check_servers(self) -> None:
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
    settings: Settings, urls: Urls, faces: Callable[[Replica], Iterable[Service]] = lambda _replica: ()
) -> int:
    """Run a replica with what else it shows to the outside, which lies above this module."""
    async with AsyncExitStack() as closing:
        replica = await _opened(settings, urls, closing)
        replica.supervisor.add(*faces(replica))
        # What is loaded by now stays: the collector need not look at it each time jobs have come and gone.
        gc.collect()
        gc.freeze()
        return await replica.run()


async def _opened(settings: Settings, urls: Urls, closing: AsyncExitStack) -> Replica:
    """After a power cut everything starts at once: who does not answer yet is waited for, who refuses us is told."""
    give_up_at = time.monotonic() + settings.service.start_timeout
    while True:
        try:
            return await closing.enter_async_context(Replica.open(settings, urls))
        except Unavailable as error:
            if time.monotonic() >= give_up_at:
                raise
            log.warning("start_waits", code=error.code, because=error.sentence)
        await asyncio.sleep(ASK_AGAIN_S)


def listen_tls(settings: Settings) -> Tls | None:
    wanted = settings.listen
    return Tls(wanted.tls_cert, wanted.tls_key) if wanted.tls_cert and wanted.tls_key else None


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


def redis_target(settings: Settings, url: str | None, user: RedisUser = "scheduler") -> RedisTarget:
    use = redis_for(settings, user, url)
    return RedisTarget(**msgspec.structs.asdict(use), client_name=replica_name())


@asynccontextmanager
async def opened_books(settings: Settings, database: Database, redis_url: str | None) -> AsyncIterator[Books]:
    """The books with a Redis connection of their own, which need not answer yet; without one where that is off."""
    remember_s = settings.accounting.managed_shows_ttl
    if not settings.accounting.redis.enabled:
        yield Books(database, None, remember_s=remember_s)
        return
    client = redis_infra.connect(redis_target(settings, redis_url, "accounting"))
    try:
        yield Books(database, client, remember_s=remember_s)
    finally:
        await client.aclose()


def policy_of(settings: Settings, redis: Redis | None = None) -> Kernel | None:
    """Who decides whether a job may run, for all replicas and faces of this installation; None: every job may."""
    return opening.opened(settings, redis)


def gate_of(settings: Settings) -> Gate:
    """Of who submits without a replica: where there is a policy, jobs are written as PENDING and servers ask."""
    return AskLater() if opening.has_policy(settings) else AllowAll()


def outputs_of(settings: Settings, kernel: Kernel | None, redis: Redis | None) -> tuple[Source, Checker | None] | None:
    """By which rules outputs are looked at, and who looks into them; None: nobody does."""
    wanted = settings.output_policy
    if not wanted.enabled:
        return None
    otherwise = Mode.HOLD if wanted.fail_mode == "closed" else Mode.PASS
    if isinstance(kernel, LocalKernel):
        return OfFile(kernel.snapshots, otherwise), None
    if settings.safety_kernel.addr:
        from rota.policy.client import RemoteOutputs

        unknown = elsewhere(otherwise)
        return lambda: unknown, ByKernel(RemoteOutputs(settings, redis))
    rules = of_nobody(otherwise)
    return lambda: rules, None


def submitter_of(settings: Settings, database: Database) -> Submitter:
    """For a face without a replica. Every job comes in by this or by that of the engine: behind the same gate."""
    return Submitter(database, gate=gate_of(settings))


def workflows_of(settings: Settings, queue: Queue) -> Desk:
    """For a face without a replica: what it starts servers advance."""
    database = queue.database
    sagas = Sagas(database, queue.dead_letters)
    advancing = Advancing(submitter_of(settings, database), Definitions(database), sagas)
    return Desk(Advancer(database, advancing, workflow=settings.workflow, saga=settings.saga))


def reopener_of(settings: Settings, queue: Queue) -> Reopener:
    store = Store(queue.database, store_target(settings))
    return Reopener(queue.database, queue, submitter_of(settings, queue.database), store)


async def never_booked(books: Books, tokens: Sequence[int]) -> set[int]:
    """Those of a dead dispatcher's tokens that have no proc row and, from here on, cannot get one in any show.

    A claim does not say whose frames it holds, so they are buried everywhere; that is rare, and graves are pruned. It
    may have died with tokens booked in Redis alone: Redis forgets them, or, if it is away, the recount finds them.
    """
    left = set(tokens)
    for show in await books.admin.shows():
        left = await procs.bury(books.database, show.id, sorted(left)) if left else left
    try:
        await books.forget(sorted(left))
    except RedisUnavailable as away:
        log.warning("tokens_not_forgotten", tokens=len(left), reason=away.sentence, remedy="the recount mends it")
    return left


async def ask(settings: Settings, name: str, url: str) -> None:
    """Raises unless the server at `url` answers and is fit for its role; changes nothing in it."""
    match name:
        case "postgres":
            await (await Database.open(postgres_target(settings, url))).close()
        case "redis":
            client = redis_infra.connect(redis_target(settings, url))
            try:
                await redis_infra.check_fit(client)
            finally:
                await client.aclose()
        case "nats":
            await (await Bus.connect(nats_target(settings, url))).close()


async def problem_with(settings: Settings, name: str, url: str) -> str | None:
    """What is wrong with the server at `url`, in a sentence; None when it answers."""
    try:
        await ask(settings, name, url)
    except RotaError as error:
        return error.sentence
    return None
