"""What `rota worker` does: find the app, look at the machine, and live until a signal."""

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
from rota.infra.replica import replica_name
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
    """The command line; None: as the settings or the machine say."""

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
    """Whether agents of the app run here, too."""


def run(settings: Settings, wanted: WorkerArgs) -> int:
    folder = Path.cwd()
    app = load_app.load(wanted.app, folder) if wanted.app else None
    with _work_dir(settings) as work_dir:
        plan = WorkerConfig(
            offer=build_registration(settings, wanted),
            tasks=app.tasks if app else {},
            app=wanted.app,
            folder=folder,
            work_dir=work_dir,
            keep_dirs=settings.worker.keep_dirs,
            processes=settings.worker.processes or max(1, host_metrics.cores() // 100),
            limits=_limits(settings.worker.limits),
            output_max=settings.worker.output_max,
            drain_s=settings.worker.drain_timeout,
            store=_store(settings.store),
        )
        agents = _agent_services(settings, app, plan) if app is not None and app.recurring and wanted.agents else []
        return loop.run(_serve(plan, nats_target(settings), settings, agents))


def _agent_services(settings: Settings, app: Rota, plan: WorkerConfig) -> list[Service]:
    """None, and a line about it, where PostgreSQL or Redis is not known: frames need neither."""
    # With all that a server needs, which a worker of frames alone does not.
    from rota.cli.core import output
    from rota.cli.local.up import local_url
    from rota.runtime import build_submitter, postgres_target, redis_target
    from rota.worker.agents.events import AgentEvents
    from rota.worker.agents.runner import WorkerAgents

    postgres = settings.postgres.url or local_url(settings, "postgres")
    redis = settings.redis.url or local_url(settings, "redis")
    if not settings.redis.scheduler.enabled:
        return []
    if postgres is None or redis is None:
        output.print_stderr(f"Agents of {plan.app} do not run here: set postgres.url and redis.url, which they need.")
        return []
    events = AgentEvents(nats_target(settings), settings.nats)
    agents = WorkerAgents(
        settings,
        app.recurring,
        plan.app,
        plan.folder,
        postgres_target(settings, postgres),
        redis_target(settings, redis, "agents"),
        lambda database: build_submitter(settings, database),
        plan.offer.name,
        app.failure_hook,
        events.teller.emit,
    )
    return [Service("agent_events", events.run), Service("agents", agents.run)]


async def _serve(plan: WorkerConfig, target: NatsTarget, settings: Settings, agents: list[Service]) -> int:
    worker = Worker(plan, target, streams(settings.nats))
    # What is loaded by now stays: the collector need not look at it each time frames have come and gone.
    gc.collect()
    gc.freeze()
    supervisor = Supervisor(start_timeout_s=YEAR_S, drain_budget_s=plan.drain_s + 10.0)
    supervisor.add(
        *_listener_services(supervisor, settings),
        Service("worker", worker.run),
        *agents,
    )
    status = await run_until_signalled(supervisor)
    if worker.left_behind:
        # They ignore every cancellation, and asyncio would wait for them.
        sys.stderr.flush()
        os._exit(status)
    return status


def _listener_services(supervisor: Supervisor, settings: Settings) -> list[Service]:
    """Health and metrics of this worker, for those who ask for a port."""
    wanted = settings.worker
    if not wanted.metrics_port:
        return []
    from rota.infra.service.listener import HttpListener  # with an HTTP server, which a worker does not need

    return [HttpListener(supervisor, host=wanted.metrics_host, port=wanted.metrics_port).service]


def build_registration(settings: Settings, wanted: WorkerArgs) -> RegistrationInfo:
    return RegistrationInfo(
        name=wanted.name or replica_name(),
        pool=wanted.pool or settings.worker.pool,
        slots=wanted.slots or settings.worker.slots,
        cores=host_metrics.cores() if wanted.cores is None else parse_cores(wanted.cores),
        gpus=host_metrics.Gpus().count if wanted.gpus is None else wanted.gpus,
        memory_mb=host_metrics.memory_mb() if wanted.memory is None else parse_memory(wanted.memory),
        labels=dict(_parse_label(text) for text in wanted.labels),
        capabilities=wanted.capabilities,
    )


def _store(wanted: StoreSettings) -> FileStore | None:
    return FileStore(Path(wanted.directory), wanted.most_bytes) if wanted.directory else None


def _limits(wanted: CommandLimitsSettings) -> ProcessLimits:
    return ProcessLimits(wanted.cpu_seconds, wanted.address_mib, wanted.open_files, wanted.file_mib)


def nats_target(settings: Settings) -> NatsTarget:
    wanted = settings.nats
    url = wanted.url or _local_url(settings)
    if url is None:
        raise InvalidSetting("nats.url must be set to run a worker, unless `rota up` runs in this directory.")
    return NatsTarget(
        url=url,
        prefix=wanted.prefix,
        connect_timeout_s=wanted.connect_timeout,
        publish_timeout_s=wanted.publish_timeout,
        name=replica_name(),
    )


def _local_url(settings: Settings) -> str | None:
    from rota.cli.local.up import local_url  # with all that a server needs, which a worker does not

    return local_url(settings, "nats")


def _parse_label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise InvalidInput(f"{text!r} is no label; write key=value.")
    return key, value


@contextmanager
def _work_dir(settings: Settings) -> Iterator[Path]:
    """The directory of the settings, or one of our own that goes with us."""
    given = settings.worker.work_dir
    try:
        if given:
            Path(given).mkdir(parents=True, exist_ok=True)
        made = Path(given).resolve() if given else Path(tempfile.mkdtemp(prefix="rota-worker-"))
    except OSError as error:
        raise SetupFailed(f"Cannot make the directory for frames ({error}): set worker.work-dir to a place.") from error
    try:
        yield made
    finally:
        if not given:
            shutil.rmtree(made, ignore_errors=True)
