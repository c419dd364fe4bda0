"""`rota worker`: loads the app, detects the machine's resources, and runs the worker until a signal."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from rota.infra import loop
from rota.infra.nats import NatsTarget
from rota.infra.nats.topology import streams
from rota.infra.replica import process_name
from rota.infra.service import Service, Supervisor, run_until_signalled
from rota.model.errors import InvalidInput, InvalidSetting, SetupFailed
from rota.model.jobs.work import ProcessLimits
from rota.model.settings import Settings
from rota.model.settings.kinds import YEAR_S
from rota.model.settings.lifecycle import CommandLimitsSettings
from rota.model.settings.store import StoreSettings
from rota.model.units import parse_cores, parse_memory
from rota.sdk import load_app
from rota.sdk.app import Rota
from rota.worker import host_metrics
from rota.worker.config import WorkerConfig
from rota.worker.data.blob_store import FileStore
from rota.worker.registration_info import RegistrationInfo
from rota.worker.worker import Worker


class WorkerArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The command line; None means the value of the settings or of the machine."""

    app: str = ""
    pool: str | None = None
    slots: int | None = None
    cores: str | None = None
    gpus: int | None = None
    memory: str | None = None
    name: str | None = None
    labels: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    agents: bool = True
    """Whether to run the app's agents as well."""


def run(settings: Settings, args: WorkerArgs) -> int:
    folder = Path.cwd()
    app = load_app.load(args.app, folder) if args.app else None
    with _work_dir(settings) as work_dir:
        config = WorkerConfig(
            offer=build_registration(settings, args),
            tasks=app.tasks if app else {},
            app=args.app,
            folder=folder,
            work_dir=work_dir,
            keep_dirs=settings.worker.keep_dirs,
            processes=settings.worker.processes or max(1, host_metrics.cores() // 100),
            limits=_limits(settings.worker.limits),
            output_max=settings.worker.output_max,
            drain_s=settings.worker.drain_timeout,
            store=_store(settings.store),
        )
        agents = _agent_services(settings, app, config) if app is not None and app.recurring and args.agents else []
        return loop.run(_serve(config, nats_target(settings), settings, agents), ignore_exits=True)


def _agent_services(settings: Settings, app: Rota, config: WorkerConfig) -> list[Service]:
    """Empty, with a message on standard error, when PostgreSQL or Redis is not configured: frames need neither."""
    # Late imports: they load server code, which a worker without agents does not need.
    from rota.cli.core import output
    from rota.cli.local.up import local_url
    from rota.runtime import build_submitter, postgres_target, redis_target
    from rota.worker.agents.events import AgentEvents
    from rota.worker.agents.runner import AgentApp, WorkerAgents

    postgres = settings.postgres.url or local_url(settings, "postgres")
    redis = settings.redis.url or local_url(settings, "redis")
    if not settings.redis.scheduler.enabled:
        return []
    if postgres is None or redis is None:
        output.print_stderr(f"Agents of {config.app} do not run here: set postgres.url and redis.url.")
        return []
    events = AgentEvents(nats_target(settings), settings.nats)
    agents = WorkerAgents(
        settings,
        AgentApp(config.app, config.folder, app.recurring, app.failure_hook),
        postgres_target(settings, postgres),
        redis_target(settings, redis, "agents"),
        lambda database: build_submitter(settings, database),
        events.publisher.emit,
        config.offer.name,
    )
    return [Service("agent_events", events.run), Service("agents", agents.run)]


async def _serve(config: WorkerConfig, target: NatsTarget, settings: Settings, agents: list[Service]) -> int:
    worker = Worker(config, target, streams(settings.nats))
    # Exclude everything loaded so far from garbage collection: it lives as long as the process.
    gc.collect()
    gc.freeze()
    supervisor = Supervisor(start_timeout_s=YEAR_S, drain_budget_s=config.drain_s + 10.0)
    supervisor.add(
        *_listener_services(supervisor, settings),
        Service("worker", worker.run),
        *agents,
    )
    status = await run_until_signalled(supervisor)
    if worker.abandoned_handlers:
        # The remaining tasks ignore cancellation, and asyncio.run would wait for them.
        sys.stderr.flush()
        os._exit(status)
    return status


def _listener_services(supervisor: Supervisor, settings: Settings) -> list[Service]:
    """Health and metrics endpoints of this worker, if a port is configured."""
    worker = settings.worker
    if not worker.metrics_port:
        return []
    from rota.infra.service.listener import HttpListener  # late import: loads an HTTP server

    return [HttpListener(supervisor, host=worker.metrics_host, port=worker.metrics_port).service]


def build_registration(settings: Settings, args: WorkerArgs) -> RegistrationInfo:
    return RegistrationInfo(
        name=args.name or process_name(),
        pool=args.pool or settings.worker.pool,
        slots=args.slots or settings.worker.slots,
        cores=host_metrics.cores() if args.cores is None else parse_cores(args.cores),
        gpus=host_metrics.Gpus().count if args.gpus is None else args.gpus,
        memory_mb=host_metrics.memory_mb() if args.memory is None else parse_memory(args.memory),
        labels=dict(_parse_label(text) for text in args.labels),
        capabilities=args.capabilities,
    )


def _store(settings: StoreSettings) -> FileStore | None:
    return FileStore(Path(settings.directory), settings.most_bytes) if settings.directory else None


def _limits(settings: CommandLimitsSettings) -> ProcessLimits:
    return ProcessLimits(settings.cpu_seconds, settings.address_mib, settings.open_files, settings.file_mib)


def nats_target(settings: Settings) -> NatsTarget:
    nats = settings.nats
    url = nats.url or _local_url(settings)
    if url is None:
        raise InvalidSetting("NATS is not configured: set nats.url, or start `rota up` in this directory.")
    return NatsTarget(
        url=url,
        prefix=nats.prefix,
        connect_timeout_s=nats.connect_timeout,
        publish_timeout_s=nats.publish_timeout,
        name=process_name(),
    )


def _local_url(settings: Settings) -> str | None:
    from rota.cli.local.up import local_url  # late import: loads server code

    return local_url(settings, "nats")


def _parse_label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise InvalidInput(f"{text!r} is not a valid label: use key=value.")
    return key, value


@contextmanager
def _work_dir(settings: Settings) -> Iterator[Path]:
    """The configured directory, or a temporary one that is removed on exit."""
    configured = settings.worker.work_dir
    try:
        if configured:
            Path(configured).mkdir(parents=True, exist_ok=True)
        work_dir = Path(configured).resolve() if configured else Path(tempfile.mkdtemp(prefix="rota-worker-"))
    except OSError as error:
        raise SetupFailed(
            f"The directory for frames cannot be created ({error}): set worker.work-dir to a writable directory."
        ) from error
    try:
        yield work_dir
    finally:
        if not configured:
            shutil.rmtree(work_dir, ignore_errors=True)
