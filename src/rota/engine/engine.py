"""The services of one replica's engine, wired together. Any number of replicas run all of them concurrently.

| service | what it does | on which replica |
|---|---|---|
| members | publishes and observes which replicas are live | all |
| heartbeats | reads worker heartbeats and checks the allocations they list | all |
| routes | reloads pools and topics on every change | all |
| pools_file | loads pools and topics from a file, if configured | all |
| snapshot | stores the worker registry in Redis for a warm start | all |
| news | exchanges released capacity with other replicas | all |
| doors | registers workers | whichever receives the request |
| dispatch | claims, books, assigns | each for the workers it owns |
| results | ends attempts that workers report | whichever receives the message |
| beginnings | sets jobs to RUNNING | whichever receives the message |
| recovery | silent workers, lost frames, deadlines | the leader |
| submits | submissions from the bus | whichever receives the message |
| logs | stores frame output | whichever receives the message |
| letters | dead-letters messages that NATS gave up | whichever receives the message |
| gate | decides PENDING jobs | whichever receives the message |
| gate_ending | disables fail-open while the server drains | all |
| replayer | undecided and deferred jobs, approval expiry | the leader |
| upkeep | retention of ended jobs and old names | the leader |
| outputs | scans frame outputs, if a policy requires it | whichever claims them |
| events_servers | publishes that this server starts and stops | all |
| events | publishes the events of all services | all |
| events_audit | publishes configuration changes and lost servers | the leader |
| feed | follows the event stream for local subscribers | all |
| histories | polls jobs that are watched on this replica | all |
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Final

from rota.accounting.ledger import NIL_UUID
from rota.engine.admission import controller
from rota.engine.admission.approvals import Approver
from rota.engine.admission.controller import AdmissionController, gate_for
from rota.engine.admission.pending_replayer import PendingReplayer
from rota.engine.admission.policy_call import kernel_timeout_s
from rota.engine.admission.precheck import AdmissionPrecheck
from rota.engine.backends import Backends
from rota.engine.cluster.membership import SERIES, ClusterMembership
from rota.engine.cluster.worker_registration import WorkerRegistration
from rota.engine.completion import report_consumer
from rota.engine.completion.canceller import JobCanceller
from rota.engine.completion.finisher import Finisher
from rota.engine.completion.publisher import CompletionPublisher, CompletionResult
from rota.engine.completion.report_consumer import ProgressConsumer, ReportConsumer
from rota.engine.dispatch.dispatcher import Dispatcher
from rota.engine.dispatch.state_writer import JobStateWriter
from rota.engine.events.audit_source import AuditEventPublisher
from rota.engine.events.history import HistoryWatcher, JobHistorySource
from rota.engine.events.publisher import EventPublisher
from rota.engine.events.server_presence import ServerPresence
from rota.engine.events.sink import PublishedEvents
from rota.engine.events.subscriptions import EventStream
from rota.engine.explain.explainer import Explainer
from rota.engine.outputs.async_scanner import OutputScanner
from rota.engine.outputs.sync_check import SyncOutputChecker
from rota.engine.queries.logs import LogWriter
from rota.engine.recovery.dead_letter_recorder import DeadLetterRecorder
from rota.engine.recovery.reconciler import EngineReconciler
from rota.engine.recovery.retention import RetentionMaintenance
from rota.engine.recovery.table_maintenance import TableMaintenance
from rota.engine.submission.bus_consumer import SUBMIT_CONSUMER_SPEC, BusSubmissionConsumer
from rota.engine.submission.submitter import Submitter
from rota.infra.blob_store import BlobStoreTarget
from rota.infra.clock import SystemClock
from rota.infra.nats import BatchConsumer, BatchProcessor, ConsumerSpec, CoreMessage
from rota.infra.nats.batch_processor import BatchHandler
from rota.infra.nats.topology import events_stream, streams, with_limits
from rota.infra.service import Lifecycle, Service
from rota.model.errors import InvalidInput, NatsUnavailable, TooLarge
from rota.model.ids import PoolId, ShowId
from rota.model.policy.decision import Kernel
from rota.model.protocol import RELEASED_SUBJECT, FramesReleased, decode, encode
from rota.model.quota import Usage
from rota.model.settings import Settings
from rota.placement import WorkerRegistry
from rota.placement.heartbeat_consumer import HeartbeatConsumer
from rota.placement.pools_watch import PoolsFileWatcher
from rota.placement.route_store import RouteStore, RoutesWatcher
from rota.placement.snapshot import SnapshotWriter, warm_start
from rota.policy.factory import effective_fail_mode
from rota.policy.output.checker import ContentChecker, OutputPolicySource

REPORTS_MAX: Final = 256
"""Reports that are handled together."""
MAX_CONCURRENT_REPORT_BATCHES: Final = 2
"""While one batch of reports waits for its commit, the next is read and written."""


class Engine:
    def __init__(
        self,
        settings: Settings,
        backends: Backends,
        kernel: Kernel | None = None,
        output_checks: tuple[OutputPolicySource, ContentChecker | None] | None = None,
    ) -> None:
        self.backends = backends
        self.database, self.bus, self.queue = database, bus, queue = backends.database, backends.bus, backends.queue
        self.accounting, self.store, self.leases = backends.accounting, backends.store, backends.leases
        self.event_publisher, self.event_stream = EventPublisher(database, bus), EventStream(bus)
        self.events = PublishedEvents(self.event_publisher)
        database.unknown_outcome_listeners.append(self.event_publisher.report_unconfirmed)
        self.registry = WorkerRegistry(limits=settings.routing, ttl_s=settings.registry.worker_ttl)
        self.members = ClusterMembership(
            bus, self.registry.set_ownership, self.accounting.note_server_left, self.leases.owner
        )
        self.completions = CompletionPublisher(database, self.accounting, self.events)
        self.canceller = JobCanceller(database, bus, queue, self.completions)
        checker = self._build_output_checker(settings, output_checks[0]) if output_checks is not None else None
        self.finisher = Finisher(database, queue, self.completions, self.canceller, checker, settings.scheduler)
        self.scanner: OutputScanner | None = None
        if checker is not None and output_checks is not None:
            self.scanner = OutputScanner(database, self.store, self.completions, checker, output_checks[1])
        state_writer = JobStateWriter(database, self.events, SystemClock())
        self.completions.listeners.append(state_writer.forget_ended)
        self.dispatcher = Dispatcher(
            backends, self.registry, self.finisher, state_writer, lambda: self.members.all_know(SERIES)
        )
        self.results = ReportConsumer(self.finisher, self.release_capacity, self.dispatcher.durations)
        self.recovery = EngineReconciler(
            backends,
            self.registry,
            self.members,
            self.finisher,
            self.release_capacity,
            settings.reconciler,
        )
        self.logs = LogWriter(database, bus)
        self.dead_letters = DeadLetterRecorder(bus, queue.dead_letters, self.events)
        policy_timeout_s = kernel_timeout_s(settings.safety)
        precheck = (
            AdmissionPrecheck(database, kernel, kernel_timeout_s=policy_timeout_s) if kernel is not None else None
        )
        self.submitter = Submitter(database, self.events, gate=gate_for(kernel), ahead=precheck)
        self.bus_submissions = BusSubmissionConsumer(self.submitter, queue.dead_letters)
        self.admission = AdmissionController(
            database,
            self.completions,
            kernel,
            kernel_timeout_s=policy_timeout_s,
            throttle_s=settings.scheduler.safety_throttle_delay,
            fail_open=lambda: effective_fail_mode(settings, kernel) == "open",
        )
        self.approver = Approver(database, self.admission)
        self.replayer = PendingReplayer(
            database, self.leases, self.admission, settings.replayer, approvals=self.approver
        )
        self.retention = RetentionMaintenance(
            database, self.leases, settings.retention, store=self.store, accounting=self.accounting
        )
        self.table_maintenance = TableMaintenance(database, self.leases)
        self.worker_registration = WorkerRegistration(
            database, bus, self.events, heartbeat_s=settings.worker.heartbeat_interval
        )
        self.progress = ProgressConsumer(database, bus, state_writer)
        self.routing = RouteStore(database)
        pools_path = settings.routing.pools_file
        reload_s = settings.routing.reload_interval
        self._pools = PoolsFileWatcher(self.routing, Path(pools_path), reload_s) if pools_path else None
        self._routes = RoutesWatcher(self.routing, self.registry, reload_s)
        self.explainer = Explainer(
            database, accounting=self.accounting, registry=self.registry, queues=self.dispatcher.pending_queues, bus=bus
        )
        self.histories = HistoryWatcher(JobHistorySource(database), self.event_stream)
        self._servers = ServerPresence(bus, self.members)
        self._audit = AuditEventPublisher(database, bus, self.leases, self._servers)
        self._releases: asyncio.Queue[FramesReleased] = asyncio.Queue()
        self._snapshots = SnapshotWriter(self.registry, backends.redis, self.members.name, settings.registry)
        self._settings = settings

    def _build_output_checker(self, settings: Settings, policy: OutputPolicySource) -> SyncOutputChecker:
        return SyncOutputChecker(policy, self.leases.owner, content_s=settings.output_policy.content_timeout)

    async def declare(self) -> None:
        """Create the streams and consumers that this replica needs."""
        nats = self._settings.nats
        read = [
            with_limits(spec, nats)
            for spec in (report_consumer.CONSUMER_SPEC, controller.CONSUMER_SPEC, SUBMIT_CONSUMER_SPEC)
        ]
        await self.bus.ensure([*streams(nats), events_stream(nats), *read])

    async def warm_up(self) -> None:
        """Load pools, topics and the workers of the last snapshot before the first dispatch round."""
        if self._pools is not None:
            await self._pools.reload()
        self.registry.set_routes(await self.routing.read())
        self.registry.set_ownership(self.members.owns_worker)
        await warm_start(self.registry, self.backends.redis, timeout_s=self._settings.registry.snapshot_read_timeout)

    def services(self) -> list[Service]:
        report_consumers = [
            self._batch_consumer(report_consumer.CONSUMER_SPEC, self.results.handle, most=REPORTS_MAX)
            for _ in range(MAX_CONCURRENT_REPORT_BATCHES)
        ]
        return [
            Service("events_servers", self._servers.run),
            Service("events", self.event_publisher.run),
            Service("feed", self.event_stream.run),
            Service("histories", self.histories.run),
            Service("members", self.members.run),
            *([Service("pools_file", self._pools.run)] if self._pools is not None else []),
            Service("routes", self._routes.run),
            Service("heartbeats", HeartbeatConsumer(self.bus, self.registry, self.database).run),
            Service("snapshot", self._snapshots.run),
            Service("news", self._exchange_releases),
            Service("doors", self.worker_registration.run),
            Service("dispatch", self.dispatcher.run),
            *(Service(f"results_{number}", consumer.run) for number, consumer in enumerate(report_consumers, 1)),
            Service("beginnings", self.progress.run),
            Service("recovery", self.recovery.run),
            Service("submits", self.bus_submissions.batch_consumer(self.bus, self._settings.nats).run),
            Service("letters", self.dead_letters.run),
            Service("logs", self.logs.run),
            Service("gate", self._batch_consumer(controller.CONSUMER_SPEC, self.admission.handle).run),
            Service("gate_ending", self._disable_fail_open_on_drain),
            Service("replayer", self.replayer.run),
            Service("upkeep", self.retention.run),
            Service("table_maintenance", self.table_maintenance.run),
            *([Service("outputs", self.scanner.run)] if self.scanner is not None else []),
            Service("events_audit", self._audit.run),
        ]

    async def _disable_fail_open_on_drain(self, life: Lifecycle) -> None:
        """Services stop in reverse order: fail-open is off before the admission controller stops."""
        life.ready()
        await life.until_draining()
        self.admission.is_ending = True

    def _batch_consumer(self, spec: ConsumerSpec, handler: BatchHandler, *, most: int = 256) -> BatchConsumer:
        nats, terminated = self._settings.nats, self.dead_letters.record_terminated
        processor = BatchProcessor(handler, terminated, dead_letter_retry_s=nats.nak_delay)
        return BatchConsumer(self.bus, with_limits(spec, nats), processor, most=most)

    def release_capacity(self, result: CompletionResult) -> None:
        """Frames ended: release their workers' capacity and their shows' quota here, and notify other replicas."""
        for worker, tokens in result.freed.items():
            self.registry.release_allocations(worker, tokens)
        freed = list(result.freed.items())
        for show, deleted in result.released.items():
            by_pool = deleted.by_pool()
            self.dispatcher.frames_released(show, deleted.by_job(), by_pool, deleted.batch)
            if len(self.members.live_replicas()) > 1:
                (worker, tokens), *others = freed or [(NIL_UUID, [])]
                released = [(pool, usage.cores, usage.gpus) for pool, usage in by_pool.items()]
                self._releases.put_nowait(
                    FramesReleased(worker, tokens, show, deleted.frames, released, self.members.name, others)
                )
                freed = []  # told once
        if freed and len(self.members.live_replicas()) > 1:
            (worker, tokens), *others = freed  # of series whose last frames have not ended
            self._releases.put_nowait(FramesReleased(worker, tokens, NIL_UUID, 0, (), self.members.name, others))

    async def _exchange_releases(self, life: Lifecycle) -> None:
        """Broadcast capacity released here, and apply releases of other replicas."""
        async with self.bus.subscribe_core(RELEASED_SUBJECT) as messages, asyncio.TaskGroup() as tasks:
            exchanging = [
                tasks.create_task(self._broadcast_releases()),
                tasks.create_task(self._consume_releases(messages)),
            ]
            life.ready()
            await life.until_draining()
            for task in exchanging:
                task.cancel()

    async def _broadcast_releases(self) -> None:
        while True:
            release = await self._releases.get()
            with suppress(NatsUnavailable, TooLarge):
                await self.bus.publish_core(RELEASED_SUBJECT, encode(release))

    async def _consume_releases(self, messages: asyncio.Queue[CoreMessage]) -> None:
        while True:
            message = await messages.get()
            with suppress(InvalidInput):
                release = decode(FramesReleased, message.data)
                if release.server == self.members.name:
                    continue
                for worker, tokens in [(release.worker, release.tokens), *release.others]:
                    self.registry.release_allocations(worker, tokens)
                if not release.frames:
                    continue
                by_pool = {PoolId(pool): Usage(cores, gpus) for pool, cores, gpus in release.by_pool}
                self.dispatcher.frames_released(ShowId(release.show), {release.worker: release.frames}, by_pool)


def store_target(settings: Settings) -> BlobStoreTarget:
    store = settings.store
    return BlobStoreTarget(
        directory=Path(store.directory) if store.directory else None,
        small_bytes=store.small_bytes,
        most_bytes=store.most_bytes,
    )
