"""`rota up`, `rota down` and `rota status`: Rota on one machine.

`up` owns the data directory. It writes `<data>/up.json` when everything is ready and removes it when it stops. Only the
directory's lock identifies the owner, so a stale file of a killed `up` is ignored.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from rota import runtime
from rota.accounting.admin import QuotaAdmin
from rota.accounting.resources import QuotaChange
from rota.accounting.service import AccountingService
from rota.cli.core import output
from rota.cli.local import api_key as local_key
from rota.cli.local.embedded_worker import EmbeddedWorker, EmbeddedWorkerOptions
from rota.cli.local.idle_notice import IdleNotice
from rota.client import endpoint
from rota.infra.clock import SystemClock
from rota.infra.data_dir import UP_FILE, DataDirOwner, owner_of, resolve_data_dir, unusable_path_error, write_private
from rota.infra.postgres import Database, migrate, query
from rota.infra.service import Lifecycle, Service
from rota.local import BinarySource, LocalStack, StackOptions
from rota.local.datadir import SERVERS
from rota.local.identity import RootMode
from rota.model.errors import DataDirInUse, ServerFailed
from rota.model.settings import Settings
from rota.model.settings.masking import masked_url
from rota.server import services

STOP_MARGIN_S = 45.0
"""Added to `service.drain_timeout`: the three servers stop after Rota, each within `local.server.STOP_TIMEOUT_S`."""
START_TIMEOUT_S = 90.0
POLL_INTERVAL_S = 0.05
WORKER_UP = query(__package__, "local_worker_up")
DEFAULT_NAME = "default"
DEFAULT_POOL = "local"


class UpInfo(msgspec.Struct):
    """Contents of `up.json`, which describes a running `rota up` to other commands."""

    pid: int
    listen: str
    urls: runtime.ServerUrls
    worker: str = ""
    """Name of the worker; empty without one."""
    app: str = ""
    folder: str = ""
    """App of the worker, and the directory from which it is imported."""


class ServerStatus(msgspec.Struct):
    name: str
    url: str
    ok: bool
    answer: str
    milliseconds: float


class WorkerStatus(msgspec.Struct):
    name: str
    ok: bool


class LocalStatus(msgspec.Struct):
    ok: bool
    data_dir: str
    pid: int | None
    listen: str | None
    servers: list[ServerStatus]
    worker: WorkerStatus | None = None


def data_dir(settings: Settings) -> Path:
    return resolve_data_dir(Path(settings.local.data_dir))


def stack_options(settings: Settings) -> StackOptions:
    """A local server for each one without a configured URL."""
    local = settings.local
    configured = runtime.configured_urls(settings)
    bins = {"postgres": local.postgres.bin, "redis": local.redis.bin, "nats": local.nats.bin}
    ports = {"postgres": local.postgres.port, "redis": local.redis.port, "nats": local.nats.port}
    return StackOptions(
        data_dir(settings),
        servers=tuple(name for name in SERVERS if name not in configured),
        source=BinarySource(local.source),
        root_mode=RootMode(local.root_mode),
        bins={name: bin_ for name, bin_ in bins.items() if bin_},
        ports={name: port for name, port in ports.items() if port},
    )


def with_local_store(settings: Settings) -> Settings:
    """The settings with the blob store in the data directory, unless another directory is configured."""
    if settings.store.directory:
        return settings
    store = msgspec.structs.replace(settings.store, directory=str(data_dir(settings) / "store"))
    return msgspec.structs.replace(settings, store=store)


async def up(settings: Settings, worker_options: EmbeddedWorkerOptions | None) -> int:
    """Run until a signal; without a worker when `worker_options` is None."""
    began = time.monotonic()
    settings = with_local_store(settings)
    stack = LocalStack(stack_options(settings))
    try:
        await stack.start()
        configured = runtime.configured_urls(settings)
        for name, url in configured.items():
            await runtime.check_server(settings, name, url)  # check all before changing any
        urls = runtime.ServerUrls(**{name: configured.get(name) or stack.url(name) for name in SERVERS})
        await migrate(urls.postgres)
        async with runtime.Replica.open(settings, urls) as replica:
            await create_first_show(replica.accounting)
            await local_key.ensure_key(replica.database, data_dir(settings))
            worker = await _make_worker(worker_options, settings, replica)
            replica.supervisor.add(*services(replica), stack.service)
            if worker is not None:
                waiting = replica.engine.dispatcher.pending_queues.frames_by_reason
                notice = IdleNotice(worker.registered_worker, waiting, output.print_stderr, SystemClock())
                replica.supervisor.add(worker.service, notice.service)
            replica.supervisor.add(_announcement_service(settings, stack, replica, worker, began))
            return await replica.run()
    finally:
        await stack.stop()


async def create_first_show(accounting: AccountingService) -> None:
    """Create a show that can use this whole machine, if there is no show, pool or department yet.

    In one transaction: after a crash in the middle the next start would find a pool and create no show.
    """
    if await accounting.admin.shows() or await accounting.admin.pools() or await accounting.admin.depts():
        return
    managed = accounting.live is not None
    for change in await accounting.admin.change_together(partial(_create_first_show, managed=managed)):
        await accounting.change(partial(_committed, change))


async def _create_first_show(admin: QuotaAdmin, *, managed: bool) -> list[QuotaChange]:
    cores, actor = os.cpu_count() or 1, "rota up"
    return [
        await admin.create_pool(DEFAULT_POOL, actor=actor),
        await admin.create_dept(DEFAULT_NAME, actor=actor),
        await admin.create_show(DEFAULT_NAME, actor=actor, managed=managed),
        await admin.create_subscription(DEFAULT_NAME, DEFAULT_POOL, actor=actor, size=cores, burst=cores),
        await admin.create_folder(DEFAULT_NAME, DEFAULT_NAME, actor=actor),
        await admin.create_point(DEFAULT_NAME, DEFAULT_NAME, actor=actor),
    ]


async def _committed(change: QuotaChange, _: QuotaAdmin) -> QuotaChange:
    """Nothing is left to write: only to push the change to Redis."""
    return change


async def _make_worker(
    worker_options: EmbeddedWorkerOptions | None, settings: Settings, replica: runtime.Replica
) -> EmbeddedWorker | None:
    """None without options, or when servers that are not local have no pool for it."""
    if worker_options is None:
        return None
    pools = [pool.name for pool in await replica.accounting.admin.pools()]
    if settings.worker.pool not in pools:
        output.print_stderr(f"No worker is started, because there is no pool {settings.worker.pool}: set worker.pool.")
        return None
    return EmbeddedWorker(worker_options, settings, replica, data_dir(settings))


def _announcement_service(
    settings: Settings, stack: LocalStack, replica: runtime.Replica, worker: EmbeddedWorker | None, began: float
) -> Service:
    async def body(life: Lifecycle) -> None:
        path = data_dir(settings) / UP_FILE
        up = UpInfo(os.getpid(), replica.listen_url, replica.urls)
        if worker is not None:
            up.worker, up.app, up.folder = worker.name, worker.app, str(Path.cwd())
        write_private(path, msgspec.json.encode(up))
        _print_banner(stack, replica, worker, time.monotonic() - began)
        try:
            life.ready()
            await life.until_draining()
        finally:
            path.unlink(missing_ok=True)

    return Service("announcement", body)


def _print_banner(stack: LocalStack, replica: runtime.Replica, worker: EmbeddedWorker | None, seconds: float) -> None:
    output.print_text(f"Rota is up after {seconds:.2f} s, data in {stack.options.data_dir}", style="bold green")
    for server in stack.servers.values():
        output.print_text(f"  {server.binary.label:<18} 127.0.0.1:{server.port}  ({server.binary.origin})")
    output.print_text(
        f"  {'API':<18} {replica.listen_url}/api/v1  (key in {stack.options.data_dir / endpoint.KEY_FILE})"
    )
    output.print_text(f"  {'health, metrics':<18} {replica.listen_url}")
    if worker is not None and (registered := worker.registered_worker()) is not None:
        runs = f"tasks of {worker.app} and commands" if worker.app else "commands; --app adds tasks"
        output.print_text(f"  {'worker':<18} {worker.name}, {registered.cores / 100:g} cores  ({runs})")
    output.print_text("Ctrl-C stops it; `rota status` in another terminal shows its state.")


def up_detached(settings: Settings, config: Path | None, worker_options: EmbeddedWorkerOptions | None) -> int:
    """Start `rota up` in its own session, and return when it is ready or has failed."""
    folder = data_dir(settings)
    if owner := owner_of(folder):
        raise DataDirInUse(f"Rota is already up in {folder} (process {owner.pid}): `rota down` stops it.")
    log = folder / f"up-{os.getpid()}.log"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        child = _spawn_detached(log, config, worker_options)
    except OSError as error:
        raise unusable_path_error(folder, error) from error
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if (up_info := _read_up_file(folder)) and up_info.pid == child.pid:
            log.rename(folder / "up.log")
            output.print_text(f"Rota is up (process {child.pid}), {up_info.listen}; `rota down` stops it.")
            return 0
        with suppress(subprocess.TimeoutExpired):
            child.wait(POLL_INTERVAL_S)
            sys.stderr.write(log.read_text(errors="replace"))
            log.unlink()
            return child.returncode or 1
    child.terminate()
    raise ServerFailed(f"Rota was not ready within {START_TIMEOUT_S:.0f} s and was stopped: see {log}.")


def _spawn_detached(
    log: Path, config: Path | None, worker_options: EmbeddedWorkerOptions | None
) -> subprocess.Popen[bytes]:
    # -P: a file in the current directory must not shadow a module.
    command = [sys.executable, "-P", "-m", "rota.cli", *(["--config", str(config)] if config else []), "up"]
    command += (
        ["--no-worker"] if worker_options is None else ["--app", worker_options.app] if worker_options.app else []
    )
    with log.open("wb") as file:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )


def down(settings: Settings) -> str:
    folder = data_dir(settings)
    owner, signalled = owner_of(folder), DataDirOwner(0)
    if owner is None:
        return f"Rota is not up in {folder}."
    within_s = settings.service.drain_timeout + STOP_MARGIN_S
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if owner is None:
            return f"Rota in {folder} has stopped."
        if owner != signalled and owner.alive:
            with suppress(ProcessLookupError):
                os.kill(owner.pid, signal.SIGTERM)
            signalled = owner
        time.sleep(POLL_INTERVAL_S)
        owner = owner_of(folder)
    raise DataDirInUse(
        f"{folder} is still in use by process {signalled.pid or 'unknown'} after {within_s:.0f} s: "
        "see its log, or kill it and its servers."
    )


def local_url(settings: Settings, name: str) -> str | None:
    """URL of the server `name` of the `rota up` in this data directory; None when it is not up."""
    up_info = read_up_info(settings)
    return getattr(up_info.urls, name) if up_info else None


def read_up_info(settings: Settings) -> UpInfo | None:
    """`up.json` of the `rota up` in this data directory; None when it is not up."""
    folder = data_dir(settings)
    up_info, owner = _read_up_file(folder), owner_of(folder)
    return up_info if up_info and owner and up_info.pid == owner.pid else None


async def status(settings: Settings, *, with_secrets: bool) -> LocalStatus:
    folder = data_dir(settings)
    owner, up_info = owner_of(folder), _read_up_file(folder)
    if up_info and not (owner and owner.pid == up_info.pid):
        up_info = None  # stale: left behind by a killed process
    urls = msgspec.structs.asdict(up_info.urls) if up_info else runtime.configured_urls(settings)
    answers = await asyncio.gather(
        *(_check_server(settings, name, url, with_secrets=with_secrets) for name, url in urls.items())
    )
    complete = len(answers) == len(SERVERS) and all(answer.ok for answer in answers)
    pid, listen = owner.pid if owner else None, up_info.listen if up_info else None
    found = LocalStatus(complete, str(folder), pid, listen, list(answers))
    if up_info is not None and up_info.worker and complete:
        found.worker = WorkerStatus(up_info.worker, await _worker_is_up(settings, up_info))
        found.ok = found.worker.ok
    return found


async def _worker_is_up(settings: Settings, up_info: UpInfo) -> bool:
    database = await Database.open(runtime.postgres_target(settings, up_info.urls.postgres))
    try:
        return bool(await database.value(WORKER_UP, up_info.worker))
    finally:
        await database.close()


async def _check_server(settings: Settings, name: str, url: str, *, with_secrets: bool) -> ServerStatus:
    began = time.monotonic()
    problem = await runtime.server_problem(settings, name, url)
    shown = url if with_secrets else masked_url(url)
    took_ms = round((time.monotonic() - began) * 1000, 1)
    return ServerStatus(name, shown, problem is None, problem or "answers", took_ms)


def _read_up_file(folder: Path) -> UpInfo | None:
    try:
        return msgspec.json.decode((folder / UP_FILE).read_bytes(), type=UpInfo)
    except (OSError, msgspec.DecodeError, UnicodeError):
        return None


def print_status(found: LocalStatus) -> None:
    if found.pid is not None:
        owner = f"process {found.pid}" if found.pid else "an unknown process"
        output.print_text(f"Rota is up in {found.data_dir} ({owner}), {found.listen or 'starting or stopping'}")
    elif not found.servers:
        output.print_text(f"Rota is not up in {found.data_dir}; `rota up` starts it.")
    if found.servers:
        rows = [(s.name, "yes" if s.ok else "NO", f"{s.milliseconds} ms", s.url, s.answer) for s in found.servers]
        output.print_table(("server", "ok", "took", "url", "answer"), rows)
    if found.worker is not None:
        output.print_text(
            f"The worker {found.worker.name} {'is up' if found.worker.ok else 'is NOT up'}; see `rota workers`."
        )
