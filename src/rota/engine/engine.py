"""The parts of the pipeline in one replica, tied together. Any number of replicas run all of it at once.

| service | what it does | who of several |
|---|---|---|
| members | says and hears which replicas live | all |
| heartbeats | hears workers, and asks the books about what they list | all |
| routes | reads pools and topics on every change | all |
| pools_file | loads pools and topics from a file, where one is set | all |
| doors | lets workers in | whoever hears the question |
| dispatch | claims, books, hands over | each for the workers it feeds |
| results | ends what workers report | whoever gets the message |
| beginnings | marks jobs as RUNNING | whoever hears it |
| recovery | silent workers, lost frames, deadlines | the leader |
| submits | submissions from the bus | whoever gets the message |
| logs | keeps what frames write | whoever hears it |
| letters | messages that NATS gave up | whoever hears it |
| gate | decides about jobs that are PENDING | whoever gets the message |
| gate_ending | keeps a silent policy from opening the gate of a server that ends | all |
| replayer | jobs that nobody has decided about | the leader |
| upkeep | days of what has ended, old names | the leader |
| outputs | looks into what frames returned, where a policy asks for it | whoever claims it |
| events_servers | says that this server came, and goes | all |
| events | publishes what the others say of their work | all |
| events_audit | tells what people changed, and which servers were lost | the leader |
| feed | follows events, for whoever reads them here | all |
| histories | looks at jobs that somebody watches here | all |
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Final
from uuid import UUID

from redis.asyncio import Redis

from rota.accounting.books import Books
from rota.engine import gatekeeper, results
from rota.engine.approving import Approver
from rota.engine.dispatch import Dispatcher
from rota.engine.doors import Doors
from rota.engine.ender import Ender
from rota.engine.events import Teller
from rota.engine.events_audit import AuditTeller
from rota.engine.events_feed import Feed
from rota.engine.events_history import Histories, OfJobs
from rota.engine.events_servers import Servers
from rota.engine.events_sources import Sources
from rota.engine.explain import Explainer
from rota.engine.finish import Finisher, JobEnd, Told
from rota.engine.gate_ahead import Ahead
from rota.engine.gatekeeper import Gatekeeper, gate_before
from rota.engine.logs import LogKeeper
from rota.engine.members import Members
from rota.engine.outputs import Outputs
from rota.engine.outputs_scanner import Scanner
from rota.engine.recovery import Recovery
from rota.engine.replay import Replayer
from rota.engine.results import Beginnings, Results
from rota.engine.submit import Submitter
from rota.engine.submit_intake import SUBMITS, Intake
from rota.engine.upkeep import Upkeep
from rota.engine.upkeep_letters import Letters
from rota.infra.lease import Leases
from rota.infra.nats import Bus, ConsumerSpec, Handling, Heard
from rota.infra.nats.declared import events, limited, streams
from rota.infra.nats.handling import Handler
from rota.infra.postgres import Database
from rota.infra.service import Lifecycle, Service
from rota.infra.store import Store, StoreTarget
from rota.model.errors import InvalidInput, NatsUnavailable
from rota.model.ids import ShowId
from rota.model.messages import FREED, Freed, decode, encode
from rota.model.policy import Kernel
from rota.model.settings import Settings
from rota.placement import Registry
from rota.placement.listening import HeartbeatListener
from rota.placement.pools_watch import PoolsWatch
from rota.placement.routing import RoutesWatch, Routing
from rota.placement.snapshot import SnapshotWriter, warm_start
from rota.policy.opening import fail_mode
from rota.policy.output.asking import Checker, Source
from rota.queue import Queue

RESULTS_AT_ONCE: Final = 2
"""Batches of reports: while one waits for its commit the next is read and written."""


class Engine:
    def __init__(
        self,
        settings: Settings,
        database: Database,
        redis: Redis,
        bus: Bus,
        books: Books,
        queue: Queue,
        kernel: Kernel | None = None,
        looks: tuple[Source, Checker | None] | None = None,
    ) -> None:
        self.database = database
        self.bus = bus
        self.queue = queue
        self.books = books
        self.leases = leases = Leases(database)
        self.registry = Registry(limits=settings.routing, ttl_s=settings.registry.worker_ttl)
        self.members = Members(bus, leases.owner)
        self.finisher = Finisher(database, queue, books, settings.scheduler)
        self.store = Store(database, store_target(settings))
        self.scanner = self._scanner(settings, *looks) if looks is not None else None
        self.dispatcher = Dispatcher(database, queue, books, bus, self.registry, self.finisher, leases, self.store)
        self.ender = Ender(database, bus, self.finisher)
        self.ender.on_ended = self._ended
        self.results = Results(self.finisher, self.dispatcher.marks, self.freed)
        self.recovery = Recovery(
            database,
            bus,
            leases,
            self.registry,
            self.members,
            self.finisher,
            self.ender,
            self.freed,
            settings.reconciler,
        )
        self.logs = LogKeeper(database, bus)
        self.letters = Letters(bus, queue.dead_letters)
        ahead = Ahead(database, kernel) if kernel is not None else None
        self.submitter = Submitter(database, gate=gate_before(kernel), ahead=ahead)
        self.intake = Intake(self.submitter, queue.dead_letters)
        self.gatekeeper = Gatekeeper(
            database,
            self.finisher,
            kernel,
            throttle_s=settings.scheduler.safety_throttle_delay,
            fail_open=lambda: fail_mode(settings, kernel) == "open",
        )
        self.gatekeeper.on_ended = self._ended
        self.approver = Approver(database, self.gatekeeper)
        self.replayer = Replayer(database, leases, self.gatekeeper, settings.replayer, approvals=self.approver)
        self.upkeep = Upkeep(database, leases, settings.retention, store=self.store, books=books)
        self.doors = Doors(database, bus, heartbeat_s=settings.worker.heartbeat_interval)
        self.beginnings = Beginnings(database, bus, self.dispatcher.marks)
        self.members.on_change = lambda: self.registry.feed_by(self.members.feeds)
        self.routing = Routing(database)
        named = settings.routing.pools_file
        every_s = settings.routing.reload_interval
        self._pools = PoolsWatch(self.routing, Path(named), every_s) if named else None
        self._routes = RoutesWatch(self.routing, self.registry, every_s)
        self.explainer = Explainer(database, books=books, registry=self.registry, board=self.dispatcher.board, bus=bus)
        self.teller, self.feed = Teller(database, bus), Feed(bus)
        self.histories = Histories(OfJobs(database), self.feed)
        self._servers = Servers(bus, self.members)
        self._audit = AuditTeller(database, bus, leases, self._servers)
        self._have_events_told()
        self._news: asyncio.Queue[Freed] = asyncio.Queue()
        self._snapshots = SnapshotWriter(self.registry, redis, self.members.name, settings.registry)
        self._settings = settings
        self._redis = redis

    def _scanner(self, settings: Settings, policy: Source, checker: Checker | None) -> Scanner:
        self.finisher.outputs = Outputs(policy, self.leases.owner, content_s=settings.output_policy.content_timeout)
        return Scanner(self.database, self.store, self.finisher, self.finisher.outputs, checker)

    def _have_events_told(self) -> None:
        Sources(self.teller).connect(
            self.submitter,
            self.gatekeeper,
            self.approver,
            self.dispatcher.marks,
            self.finisher,
            self.doors,
            self.recovery,
            self.letters,
        )

    async def declare(self) -> None:
        """Make the streams and consumers that this replica needs."""
        nats = self._settings.nats
        read = [limited(spec, nats) for spec in (results.SPEC, gatekeeper.SPEC, SUBMITS)]
        await self.bus.ensure([*streams(nats), events(nats), *read])

    async def warm_up(self) -> None:
        """Know pools, topics and the workers of the last snapshot before the first frame is looked at."""
        if self._pools is not None:
            await self._pools.look()
        self.registry.route(await self.routing.read())
        self.registry.feed_by(self.members.feeds)
        await warm_start(self.registry, self._redis, timeout_s=self._settings.registry.snapshot_read_timeout)

    def services(self) -> list[Service]:
        ends = [self._handling(results.SPEC, self.results.handle, most=64) for _ in range(RESULTS_AT_ONCE)]
        return [
            Service("events_servers", self._servers.run),
            Service("events", self.teller.run),
            Service("feed", self.feed.run),
            Service("histories", self.histories.run),
            Service("members", self.members.run),
            *([Service("pools_file", self._pools.run)] if self._pools is not None else []),
            Service("routes", self._routes.run),
            Service("heartbeats", HeartbeatListener(self.bus, self.registry, self.database).run),
            Service("snapshot", self._snapshots.run),
            Service("news", self._share_news),
            Service("doors", self.doors.run),
            Service("dispatch", self.dispatcher.run),
            *(Service(f"results_{number}", handling.run) for number, handling in enumerate(ends, 1)),
            Service("beginnings", self.beginnings.run),
            Service("recovery", self.recovery.run),
            Service("submits", self.intake.handling(self.bus, self._settings.nats).run),
            Service("letters", self.letters.run),
            Service("logs", self.logs.run),
            Service("gate", self._handling(gatekeeper.SPEC, self.gatekeeper.handle).run),
            Service("gate_ending", self._end_gate),
            Service("replayer", self.replayer.run),
            Service("upkeep", self.upkeep.run),
            *([Service("outputs", self.scanner.run)] if self.scanner is not None else []),
            Service("events_audit", self._audit.run),
        ]

    async def _end_gate(self, life: Lifecycle) -> None:
        """Services end in reverse: from before the gatekeeper ends, a silent policy opens nothing."""
        life.ready()
        await life.until_draining()
        self.gatekeeper.is_ending = True

    def _handling(self, spec: ConsumerSpec, handler: Handler, *, most: int = 256) -> Handling:
        nats, terminated = self._settings.nats, self.letters.terminated
        read = limited(spec, nats)
        return Handling(self.bus, read, handler, terminated, most=most, dead_letter_retry_s=nats.nak_delay)

    def freed(self, worker: UUID, told: Told) -> None:
        """Frames ended: their worker has room, and so have their shows; other replicas hear of it, too."""
        self.registry.freed(worker, told.freed)
        for show, deleted in told.released.items():
            self.dispatcher.released(show, deleted.by_job())
            if len(self.members.present()) > 1:
                self._news.put_nowait(Freed(worker, told.freed, show, deleted.frames))

    async def _share_news(self, life: Lifecycle) -> None:
        """Tell other replicas what was freed here, and hear what was freed there."""
        async with self.bus.hear(FREED) as heard, asyncio.TaskGroup() as tasks:
            working = [tasks.create_task(self._tell_news()), tasks.create_task(self._hear_news(heard))]
            life.ready()
            await life.until_draining()
            for task in working:
                task.cancel()

    async def _tell_news(self) -> None:
        while True:
            news = await self._news.get()
            with suppress(NatsUnavailable):
                await self.bus.tell(FREED, encode(news))

    async def _hear_news(self, heard: asyncio.Queue[Heard]) -> None:
        while True:
            message = await heard.get()
            with suppress(InvalidInput):
                news = decode(Freed, message.data)
                self.registry.freed(news.worker, news.tokens)
                self.dispatcher.released(ShowId(news.show), {news.worker: news.frames})

    def _ended(self, jobs: list[JobEnd]) -> None:
        self.dispatcher.marks.ended(job.job for job in jobs)


def store_target(settings: Settings) -> StoreTarget:
    wanted = settings.store
    return StoreTarget(
        directory=Path(wanted.directory) if wanted.directory else None,
        small_bytes=wanted.small_bytes,
        most_bytes=wanted.most_bytes,
    )
