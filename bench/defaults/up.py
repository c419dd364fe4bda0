"""`rota up --app APP` as people start it: the embedded servers, a server and a worker, in a new directory.

Only the worker's concurrency is set. A frame asks for the cores of its kind by default, one for a sync task and a
command; where more slots than cores are to be busy at once, jobs ask for less (`cores_of`), as a user would have to.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import asyncpg
import msgspec

from bench.contenders.serve import PRODUCERS
from bench.defaults.app import Tasks
from bench.e2e.deployment import BY_INDEX, START_TIMEOUT_S, Broken, Farm, own_environment, rota_process, until
from bench.e2e.setup import Ground
from rota import Rota
from rota.client.endpoint import read_key
from rota.infra.postgres import Database, PostgresTarget
from rota.sdk.app import ASYNC_CORES, SYNC_CORES

DATA: Final = ".rota"
"""Where `rota up` keeps its data by default."""
DATABASE: Final = "rota"
APP: Final = "bench.defaults.app:app"
CORES_BY_KIND: Final = {"async": float(ASYNC_CORES), "sync": float(SYNC_CORES), "command": 1.0}


class UpFile(msgspec.Struct):
    """The parts of `up.json` that are read here."""

    pid: int
    listen: str
    urls: dict[str, str]


@dataclass(frozen=True, slots=True)
class Instance:
    """A `rota up` that is ready, with a client of its API."""

    farm: Farm
    tasks: Tasks
    database: Database
    port: int
    key: str
    postgres_url: str


def cores_of(kind: str, slots: int, machine: int) -> float:
    """Cores that a frame asks for: by default, or less if so many slots could not be busy at once otherwise."""
    return min(CORES_BY_KIND[kind], machine * 100 // slots / 100)


def for_slots(slots: int) -> dict[str, str]:
    """Settings of a worker that runs so many frames at once, with as many processes for sync tasks."""
    return {"ROTA_WORKER_SLOTS": str(slots), "ROTA_WORKER_PROCESSES": str(slots)}


@asynccontextmanager
async def up(settings: Mapping[str, str] | None = None, *, worker: bool = True) -> AsyncIterator[Instance]:
    """On any free port; nothing is left of it when this returns."""
    async with AsyncExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="rota-bench-up-")))
        words = ("up", "--app", APP) if worker else ("up", "--no-worker")
        env = own_environment(folder) | {"ROTA_LISTEN_PORT": "0"} | dict(settings or {})
        process = await closing.enter_async_context(rota_process("up", folder, env, *words))

        async def is_up() -> bool:
            if process.returncode is not None:
                raise Broken("`rota up` ended at its start")
            return (folder / DATA / "up.json").exists()

        await until(is_up, START_TIMEOUT_S, "`rota up`")
        found = msgspec.json.decode((folder / DATA / "up.json").read_bytes(), type=UpFile)
        yield await _connected(found, folder, closing)


async def _connected(found: UpFile, folder: Path, closing: AsyncExitStack) -> Instance:
    key = read_key(folder / DATA)
    assert key
    url = found.urls["postgres"]
    looking = await asyncpg.connect(url, server_settings=BY_INDEX)
    closing.push_async_callback(looking.close)
    admin = await asyncpg.connect(url)
    closing.push_async_callback(admin.close)
    database = await Database.open(PostgresTarget(url=url, pool_min=PRODUCERS))
    closing.push_async_callback(database.close)
    app = Rota(found.listen, key=key.text)
    closing.push_async_callback(app.close)
    farm = Farm(Ground(found.urls, {"up": found.pid}, folder, admin), database, looking, {})
    await farm.begin()
    return Instance(farm, Tasks(app), database, int(found.listen.rpartition(":")[2]), key.text, url)


def machine_cores() -> int:
    """As `rota up` counts those of its worker."""
    return os.cpu_count() or 1
