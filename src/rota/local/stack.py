"""Starts the three servers concurrently, restarts one that dies, and stops them cleanly."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from rota.infra.data_dir import unusable_path_error
from rota.infra.service import Lifecycle, RestartPolicy, Service
from rota.local import binaries
from rota.local.binaries import BinarySource
from rota.local.datadir import SERVERS, DataDir
from rota.local.identity import RootMode
from rota.local.nats import NatsServer
from rota.local.postgres import PostgresServer
from rota.local.redis import RedisServer
from rota.local.server import LocalServer
from rota.model.errors import PortTaken, ServerFailed

log = structlog.get_logger(__name__)

RESTARTS_MAX = 5
RESTARTS_WINDOW_S = 60.0
RESTART_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class StackOptions:
    """Options of a local stack. `servers` omits those that are used by URL."""

    data_dir: Path
    servers: tuple[str, ...] = SERVERS
    source: BinarySource = BinarySource.AUTO
    bins: dict[str, str] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    root_mode: RootMode = RootMode.AUTO
    durable: bool = True
    redis_databases: int = 16
    redis_cluster: bool = False


class LocalStack:
    """Owns a data directory and its servers from `start` to `stop`. Start it from the main thread."""

    def __init__(self, options: StackOptions) -> None:
        self.options = options
        self.servers: dict[str, LocalServer] = {}
        self.start_s = 0.0
        self._home: DataDir | None = None
        self._stopping = False

    def url(self, name: str) -> str:
        """The URL of `name` with its password."""
        return self.servers[name].url

    async def start(self) -> None:
        """All servers are ready when this returns; if it raises, none is left running."""
        began = time.monotonic()
        self._home = DataDir.claim(self.options.data_dir)
        try:
            found = {
                kind.name: binaries.find_binary(kind, self.options.bins.get(kind.name), self.options.source)
                for kind in binaries.BINARY_SPECS
                if kind.name in self.options.servers
            }
            self._home.prepare()
            self.servers = {name: self._server(name, self._home, binary) for name, binary in found.items()}
            await self._start_all()
        except OSError as error:
            await self.stop()
            raise unusable_path_error(self.options.data_dir, error) from error
        except BaseException:
            await self.stop()
            raise
        self.start_s = time.monotonic() - began

    def _server(self, name: str, home: DataDir, binary: binaries.Binary) -> LocalServer:
        options, port = self.options, self.options.ports.get(name)
        match name:
            case "postgres":
                return PostgresServer(home, binary, port, root_mode=options.root_mode, durable=options.durable)
            case "redis":
                return RedisServer(home, binary, port, databases=options.redis_databases, cluster=options.redis_cluster)
            case "nats":
                return NatsServer(home, binary, port)
        raise AssertionError(f"no local server is called {name}")

    async def _start_all(self) -> None:
        with _first_error():
            async with asyncio.TaskGroup() as group:
                for server in self.servers.values():
                    group.create_task(server.start())

    @property
    def service(self) -> Service:
        """`watch` as a service; the process ends if it fails."""
        return Service("local_servers", self._serve, restarts=RestartPolicy(limit=0))

    async def _serve(self, life: Lifecycle) -> None:
        with _first_error():
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(self.watch())
                life.ready()
                await life.until_draining()
                watch.cancel()

    async def watch(self) -> None:
        """Restart a server that dies, at the same URL; raises if one dies too often."""
        with _first_error():
            async with asyncio.TaskGroup() as group:
                for server in self.servers.values():
                    group.create_task(self._restart_on_exit(server))

    async def _restart_on_exit(self, server: LocalServer) -> None:
        restarts: deque[float] = deque(maxlen=RESTARTS_MAX)
        while True:
            assert server.process
            await server.process.wait()
            if self._stopping:
                return
            now = time.monotonic()
            if len(restarts) == RESTARTS_MAX and now - restarts[0] < RESTARTS_WINDOW_S:
                raise ServerFailed(
                    f"{server.binary.label} died {RESTARTS_MAX + 1} times within {RESTARTS_WINDOW_S:.0f} s: "
                    f"see its log, {server.log_path}"
                )
            restarts.append(now)
            log.warning("local_server_died", server=server.name, status=server.process.status)
            try:
                await server.restart()
            except (ServerFailed, PortTaken) as error:  # counted above in the next iteration
                log.warning("local_server_restart_failed", server=server.name, problem=error.sentence)
                await asyncio.sleep(RESTART_PAUSE_S * len(restarts))
                continue
            log.info("local_server_restarted", server=server.name, seconds=round(time.monotonic() - now, 3))

    async def stop(self) -> None:
        """Stop every server cleanly and release the data directory. Idempotent."""
        self._stopping = True
        await asyncio.gather(*(server.stop() for server in self.servers.values()))
        if self._home:
            self._home.release()
            self._home = None


@contextmanager
def _first_error() -> Iterator[None]:
    """Raise the first error of a group instead of the group: users need one sentence, and the others follow from it."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
