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

from rota.accounting.service import AccountingService
from rota.engine.admission import controller
from rota.engine.admission.approvals import Approver
from rota.engine.admission.controller import AdmissionController, gate_for
from rota.engine.admission.pending_replayer import PendingReplayer
from rota.engine.admission.precheck import AdmissionPrecheck
from rota.engine.cluster.membership import ClusterMembership
from rota.engine.cluster.worker_registration import WorkerRegistration
from rota.engine.completion import report_consumer
from rota.engine.completion.canceller import JobCanceller
from rota.engine.completion.finisher import CompletionResult, Finisher, JobEnd
from rota.engine.completion.report_consumer import ProgressConsumer, ReportConsumer
from rota.engine.dispatch.dispatcher import Dispatcher
from rota.engine.events.audit_source import AuditEventPublisher
from rota.engine.events.history import HistoryWatcher, JobHistorySource
from rota.engine.events.publisher import EventPublisher
from rota.engine.events.server_presence import ServerPresence
from rota.engine.events.sources import EventSources
from rota.engine.events.subscriptions import EventStream
from rota.engine.explain.explainer import Explainer
from rota.engine.outputs.async_scanner import OutputScanner
from rota.engine.outputs.sync_check import SyncOutputChecker
from rota.engine.queries.logs import LogWriter
from rota.engine.recovery.dead_letter_recorder import DeadLetterRecorder
from rota.engine.recovery.reconciler import EngineReconciler
from rota.engine.recovery.retention import RetentionMaintenance
from rota.engine.submission.bus_consumer import SUBMIT_CONSUMER_SPEC, BusSubmissionConsumer
from rota.engine.submission.submitter import Submitter
from rota.infra.blob_store import BlobStore, BlobStoreTarget
from rota.infra.lease import Leases
from rota.infra.nats import BatchConsumer, Bus, ConsumerSpec, CoreMessage
from rota.infra.nats.batch_consumer import BatchHandler
from rota.infra.nats.topology import events_stream, streams, with_limits
from rota.infra.postgres import Database
from rota.infra.service import Lifecycle, Service
from rota.model.errors import InvalidInput, NatsUnavailable
from rota.model.ids import ShowId
from rota.model.policy.decision import Kernel
from rota.model.protocol import RELEASED_SUBJECT, FramesReleased, decode, encode
from rota.model.settings import Settings
from rota.placement import WorkerRegistry
from rota.placement.heartbeat_consumer import HeartbeatConsumer
from rota.placement.pools_watch import PoolsFileWatcher
from rota.placement.route_store import RouteStore, RoutesWatcher
from rota.placement.snapshot import SnapshotWriter, warm_start
from rota.policy.factory import effective_fail_mode
from rota.policy.output.checker import ContentChecker, OutputPolicySource
from rota.queue import Queue

MAX_CONCURRENT_REPORT_BATCHES: Final = 2
"""Batches of reports: while one waits for its commit the next is read and written."""


class Engine:
    def __init__(
        self,
        settings: Settings,
        database: Database,
        redis: Redis,
        bus: Bus,
        books: AccountingService,
        queue: Queue,
        kernel: Kernel | None = None,
        looks: tuple[OutputPolicySource, ContentChecker | None] | None = None,
    ) -> None:
        self.database = database
        self.bus = bus
        self.queue = queue
        self.books = books
        self.leases = leases = Leases(database)
        self.registry = WorkerRegistry(limits=settings.routing, ttl_s=settings.registry.worker_ttl)
        self.members = ClusterMembership(bus, leases.owner)
        self.finisher = Finisher(database, queue, books, settings.scheduler)
        self.store = BlobStore(database, store_target(settings))
        self.scanner = self._build_scanner(settings, *looks) if looks is not None else None
        self.dispatcher = Dispatcher(database, queue, books, bus, self.registry, self.finisher, leases, self.store)
        self.ender = JobCanceller(database, bus, self.finisher)
        self.ender.on_ended = self._jobs_ended
        self.results = ReportConsumer(self.finisher, self.dispatcher.state_writer, self.release_capacity)
        self.recovery = EngineReconciler(
            database,
            bus,
            leases,
            self.registry,
            self.members,
            self.finisher,
            self.ender,
            self.release_capacity,
            settings.reconciler,
        )
        self.logs = LogWriter(database, bus)
        self.letters = DeadLetterRecorder(bus, queue.dead_letters)
        ahead = AdmissionPrecheck(database, kernel) if kernel is not None else None
        self.submitter = Submitter(database, gate=gate_for(kernel), ahead=ahead)
        self.intake = BusSubmissionConsumer(self.submitter, queue.dead_letters)
        self.gatekeeper = AdmissionController(
            database,
            self.finisher,
            kernel,
            throttle_s=settings.scheduler.safety_throttle_delay,
            fail_open=lambda: effective_fail_mode(settings, kernel) == "open",
        )
        self.gatekeeper.on_ended = self._jobs_ended
        self.approver = Approver(database, self.gatekeeper)
        self.replayer = PendingReplayer(database, leases, self.gatekeeper, settings.replayer, approvals=self.approver)
        self.upkeep = RetentionMaintenance(database, leases, settings.retention, store=self.store, books=books)
        self.doors = WorkerRegistration(database, bus, heartbeat_s=settings.worker.heartbeat_interval)
        self.beginnings = ProgressConsumer(database, bus, self.dispatcher.state_writer)
        self.members.on_change = lambda: self.registry.set_ownership(self.members.owns_worker)
        self.routing = RouteStore(database)
        named = settings.routing.pools_file
        every_s = settings.routing.reload_interval
        self._pools = PoolsFileWatcher(self.routing, Path(named), every_s) if named else None
        self._routes = RoutesWatcher(self.routing, self.registry, every_s)
        self.explainer = Explainer(
            database, books=books, registry=self.registry, board=self.dispatcher.pending_queues, bus=bus
        )
        self.teller, self.feed = EventPublisher(database, bus), EventStream(bus)
        self.histories = HistoryWatcher(JobHistorySource(database), self.feed)
        self._servers = ServerPresence(bus, self.members)
        self._audit = AuditEventPublisher(database, bus, leases, self._servers)
        self._connect_event_sources()
        self._news: asyncio.Queue[FramesReleased] = asyncio.Queue()
        self._snapshots = SnapshotWriter(self.registry, redis, self.members.name, settings.registry)
        self._settings = settings
        self._redis = redis

    def _build_scanner(
        self, settings: Settings, policy: OutputPolicySource, checker: ContentChecker | None
    ) -> OutputScanner:
        self.finisher.outputs = SyncOutputChecker(
            policy, self.leases.owner, content_s=settings.output_policy.content_timeout
        )
        return OutputScanner(self.database, self.store, self.finisher, self.finisher.outputs, checker)

    def _connect_event_sources(self) -> None:
        EventSources(self.teller).connect(
            self.submitter,
            self.gatekeeper,
            self.approver,
            self.dispatcher.state_writer,
            self.finisher,
            self.doors,
            self.recovery,
            self.letters,
        )

    async def declare(self) -> None:
        """Make the streams and consumers that this replica needs."""
        nats = self._settings.nats
        read = [
            with_limits(spec, nats)
            for spec in (report_consumer.CONSUMER_SPEC, controller.CONSUMER_SPEC, SUBMIT_CONSUMER_SPEC)
        ]
        await self.bus.ensure([*streams(nats), events_stream(nats), *read])

    async def warm_up(self) -> None:
        """Know pools, topics and the workers of the last snapshot before the first frame is looked at."""
        if self._pools is not None:
            await self._pools.reload()
        self.registry.set_routes(await self.routing.read())
        self.registry.set_ownership(self.members.owns_worker)
        await warm_start(self.registry, self._redis, timeout_s=self._settings.registry.snapshot_read_timeout)

    def services(self) -> list[Service]:
        ends = [
            self._batch_consumer(report_consumer.CONSUMER_SPEC, self.results.handle, most=64)
            for _ in range(MAX_CONCURRENT_REPORT_BATCHES)
        ]
        return [
            Service("events_servers", self._servers.run),
            Service("events", self.teller.run),
            Service("feed", self.feed.run),
            Service("histories", self.histories.run),
            Service("members", self.members.run),
            *([Service("pools_file", self._pools.run)] if self._pools is not None else []),
            Service("routes", self._routes.run),
            Service("heartbeats", HeartbeatConsumer(self.bus, self.registry, self.database).run),
            Service("snapshot", self._snapshots.run),
            Service("news", self._exchange_releases),
            Service("doors", self.doors.run),
            Service("dispatch", self.dispatcher.run),
            *(Service(f"results_{number}", handling.run) for number, handling in enumerate(ends, 1)),
            Service("beginnings", self.beginnings.run),
            Service("recovery", self.recovery.run),
            Service("submits", self.intake.batch_consumer(self.bus, self._settings.nats).run),
            Service("letters", self.letters.run),
            Service("logs", self.logs.run),
            Service("gate", self._batch_consumer(controller.CONSUMER_SPEC, self.gatekeeper.handle).run),
            Service("gate_ending", self._disable_fail_open_on_drain),
            Service("replayer", self.replayer.run),
            Service("upkeep", self.upkeep.run),
            *([Service("outputs", self.scanner.run)] if self.scanner is not None else []),
            Service("events_audit", self._audit.run),
        ]

    async def _disable_fail_open_on_drain(self, life: Lifecycle) -> None:
        """Services end in reverse: from before the gatekeeper ends, a silent policy opens nothing."""
        life.ready()
        await life.until_draining()
        self.gatekeeper.is_ending = True

    def _batch_consumer(self, spec: ConsumerSpec, handler: BatchHandler, *, most: int = 256) -> BatchConsumer:
        nats, terminated = self._settings.nats, self.letters.record_terminated
        read = with_limits(spec, nats)
        return BatchConsumer(self.bus, read, handler, terminated, most=most, dead_letter_retry_s=nats.nak_delay)

    def release_capacity(self, worker: UUID, told: CompletionResult) -> None:
        """Frames ended: their worker has room, and so have their shows; other replicas hear of it, too."""
        self.registry.release_allocations(worker, told.freed)
        for show, deleted in told.released.items():
            self.dispatcher.frames_released(show, deleted.by_job())
            if len(self.members.live_replicas()) > 1:
                self._news.put_nowait(FramesReleased(worker, told.freed, show, deleted.frames))

    async def _exchange_releases(self, life: Lifecycle) -> None:
        """Tell other replicas what was freed here, and hear what was freed there."""
        async with self.bus.subscribe_core(RELEASED_SUBJECT) as heard, asyncio.TaskGroup() as tasks:
            working = [tasks.create_task(self._broadcast_releases()), tasks.create_task(self._consume_releases(heard))]
            life.ready()
            await life.until_draining()
            for task in working:
                task.cancel()

    async def _broadcast_releases(self) -> None:
        while True:
            news = await self._news.get()
            with suppress(NatsUnavailable):
                await self.bus.publish_core(RELEASED_SUBJECT, encode(news))

    async def _consume_releases(self, heard: asyncio.Queue[CoreMessage]) -> None:
        while True:
            message = await heard.get()
            with suppress(InvalidInput):
                news = decode(FramesReleased, message.data)
                self.registry.release_allocations(news.worker, news.tokens)
                self.dispatcher.frames_released(ShowId(news.show), {news.worker: news.frames})

    def _jobs_ended(self, jobs: list[JobEnd]) -> None:
        self.dispatcher.state_writer.forget(job.job for job in jobs)


def store_target(settings: Settings) -> BlobStoreTarget:
    wanted = settings.store
    return BlobStoreTarget(
        directory=Path(wanted.directory) if wanted.directory else None,
        small_bytes=wanted.small_bytes,
        most_bytes=wanted.most_bytes,
    )
