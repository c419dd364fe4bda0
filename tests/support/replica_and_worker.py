"""A cluster in one process: replicas with all their services, workers with the tasks below, and a show to submit to.

    async with Farm(database_url, redis_url, nats_url, prefix) as farm:
        await farm.worker(slots=8)
        job = await farm.submit("noop", frames=100)
        assert await farm.ended(job) == "SUCCEEDED"

PostgreSQL, Redis and NATS are real; replicas and workers are tasks of this process. Tests that kill or pause them start
separate processes (`tests/chaos`).
"""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec

from rota import Fatal, Retry, Rota, context
from rota.engine.queries.jobs import JobQueries
from rota.engine.submission.submitter import Submitter
from rota.infra.nats.topology import streams
from rota.infra.service import Service, Supervisor
from rota.model.jobs.submission import LayerSpec, Submission
from rota.model.settings import Settings
from rota.runtime import Replica, ServerUrls, nats_target
from rota.sdk import load_app
from rota.worker.config import WorkerConfig
from rota.worker.registration_info import RegistrationInfo
from rota.worker.worker import Worker
from tests.support.jobs import NO_EVENTS
from tests.support.queue import sql
from tests.support.waiting import until

COUNTS = sql("""
SELECT (SELECT count(*) FROM rota.proc) AS procs, (SELECT count(*) FROM rota.job) AS jobs,
       (SELECT count(*) FROM rota.layer) AS layers, (SELECT count(*) FROM rota.queue_returned) AS returned""")
STATE = sql("SELECT state, ends_as FROM rota.job WHERE pk_job = $1::uuid")
DONE = sql("""
SELECT state, reason, rota.job_history_shown(history, state, ts_submitted, ts_finished) AS history, layers
FROM rota.job_done WHERE pk_job = $1::uuid""")
ENDS = sql("""
SELECT e.frame, e.attempt, e.state, e.code, e.error, e.value FROM rota.frame_end e
WHERE e.pk_layer IN (SELECT l.pk_layer FROM rota.job_done d, unnest(d.layers) l WHERE d.pk_job = $1::uuid
                     UNION SELECT pk_layer FROM rota.layer WHERE pk_job = $1::uuid)
ORDER BY e.frame, e.attempt""")

app = Rota()
seen: dict[str, list] = {}
"""What tasks did, by name; each `Farm` clears it."""
gates: dict[str, asyncio.Event] = {}
"""The `hang` task waits for the event of its name."""


@app.task(name="noop")
async def noop(*_args, **_kwargs):
    return None


@app.task(name="echo")
async def echo(value):
    return value


@app.task(name="square")
async def square(value):
    seen.setdefault("square", []).append(value)
    return value * value


@app.task(name="note")
async def note(*_args):
    now = context()
    seen.setdefault("note", []).append((now.frame, now.attempt))


@app.task(name="boom")
async def boom():
    raise ValueError("no luck")


@app.task(name="say")
async def say(text):
    raise ValueError(text)


@app.task(name="fatal")
async def fatal():
    raise Fatal("never")


@app.task(name="flaky")
async def flaky(fails):
    now = context()
    seen.setdefault("flaky", []).append(now.attempt)
    if now.attempt <= fails:
        raise Retry("again", after=0.01)
    return now.attempt


@app.task(name="on_gpu")
async def on_gpu(name):
    """Records when it holds its GPUs, and yields to other tasks in between."""
    devices = context().gpus
    seen.setdefault("gpu", []).append((name, "took", devices))
    for _ in range(20):
        await asyncio.sleep(0)
    seen["gpu"].append((name, "gave", devices))


@app.task(name="leave")
async def leave(*names):
    for name in names:
        (context().folder / name).write_text(f"{name} of frame {context().frame}")
        context().artifact(name)


@app.task(name="hang")
async def hang(name):
    seen.setdefault("began", []).append(name)
    try:
        await gates[name].wait()
    except asyncio.CancelledError:
        seen.setdefault("stopped", []).append(name)
        raise
    return name


class Farm:
    def __init__(self, database_url, redis_url, nats_url, prefix, *, faces=lambda _replica: (), **sections):
        """`faces` adds services to a replica, such as `rota.server.services`; `sections` override settings."""
        self.urls = ServerUrls(postgres=database_url, redis=redis_url, nats=nats_url)
        base = Settings()
        self.settings = msgspec.structs.replace(
            base,
            nats=msgspec.structs.replace(base.nats, prefix=prefix),
            listen=msgspec.structs.replace(base.listen, port=0),
            **{"worker": msgspec.structs.replace(base.worker, heartbeat_interval=0.2), **sections},
        )
        self.replicas = []
        self.worker_supervisors = []
        self.faces = faces
        self._open = AsyncExitStack()
        seen.clear()
        gates.clear()

    async def __aenter__(self):
        await self._open.__aenter__()
        self.replica = await self.server()
        self.database = self.replica.database
        self.accounting = self.replica.accounting
        self.jobs = JobQueries(self.database)
        self.submitter = Submitter(self.database, NO_EVENTS)
        return self

    async def __aexit__(self, *failure):
        for gate in gates.values():
            gate.set()
        return await self._open.__aexit__(*failure)

    async def server(self):
        replica = await self._open.enter_async_context(Replica.open(self.settings, self.urls))
        replica.engine.members.name = f"{replica.engine.members.name}/{len(self.replicas)}"
        replica.engine.leases.owner = replica.engine.members.name
        self.replicas.append(replica)
        replica.supervisor.add(*self.faces(replica))
        await self._open.enter_async_context(replica.supervisor.running())
        return replica

    async def show(self, name="film", *, pool="local", size=100, burst=100, managed=True):
        """Create a show with a folder and a department named `default`, and a subscription of a pool."""
        known = {item.name for item in [*await self.accounting.admin.pools(), *await self.accounting.admin.depts()]}
        if pool not in known:
            await self.accounting.change(lambda admin: admin.create_pool(pool, actor="test"))
        if "default" not in known:
            await self.accounting.change(lambda admin: admin.create_dept("default", actor="test"))
        await self.accounting.change(lambda admin: admin.create_show(name, actor="test"))
        await self.accounting.change(lambda admin: admin.create_folder(name, "default", actor="test"))
        await self.accounting.change(
            lambda admin: admin.create_subscription(name, pool, size=size, burst=burst, actor="test")
        )
        if managed:
            await self.accounting.change(lambda admin: admin.set_managed(name, True, actor="test"))

    async def worker(self, name="w", *, slots=8, cores=None, pool="local", of="", **more):
        """Start a worker with the tasks below, or with the app `of`; returns a function that stops it."""
        offer = RegistrationInfo(
            name=name, pool=pool, slots=slots, cores=100 * slots if cores is None else cores, **more
        )
        here = Path.cwd()
        tasks = load_app.load(of, here).tasks if of else app.tasks
        plan = WorkerConfig(offer=offer, tasks=tasks, app=of, folder=here, work_dir=here / "work", drain_s=5.0)
        worker = Worker(plan, nats_target(self.settings, self.urls.nats), streams(self.settings.nats))
        supervisor = Supervisor(drain_budget_s=8.0)
        supervisor.add(Service("worker", worker.run))
        self.worker_supervisors.append(supervisor)
        stack = AsyncExitStack()
        await stack.enter_async_context(supervisor.running())
        self._open.push_async_callback(stack.aclose)
        await until(lambda: any(w.name == name for w in self.replica.engine.registry.workers.values()))
        return stack.aclose

    async def submit(self, task, *args, show="film", frames=1, layer=None, **more):
        given = {"args": list(args), "kwargs": {}} if args else None
        spec = LayerSpec(task=task, input=given, frames=frames, **(layer or {}))
        (submitted,) = await self.submitter.submit([Submission(show=show, layers=(spec,), **more)])
        return submitted.job

    async def ended(self, job, within_s=15.0):
        """Wait for the end of a job and return its final state."""
        row = await until(lambda: self.database.row(DONE, job), within_s=within_s, what=f"the end of job {job}")
        return row["state"]

    async def done(self, job):
        return await self.database.row(DONE, job)

    async def ends(self, job):
        return [tuple(row.values()) for row in await self.database.rows(ENDS, job)]

    async def running(self, name, count=1):
        await until(lambda: seen.get("began", []).count(name) >= count, what=f"{name} running")

    async def quiet(self):
        """Wait until no proc, job or layer is left."""
        await until(self._is_quiet, what="an idle cluster")

    async def _is_quiet(self):
        left = dict((await self.database.row(COUNTS)).items())
        return not left["procs"] and not left["jobs"] and not left["layers"]


def hanging(name):
    """Create the gate that the task `hang` with this name waits for."""
    gates[name] = asyncio.Event()
    return gates[name]


@asynccontextmanager
async def one_farm(database_url, redis_url, nats_url, prefix, *, workers=1, **show):
    async with Farm(database_url, redis_url, nats_url, prefix) as farm:
        await farm.show(**show)
        for number in range(workers):
            await farm.worker(f"w{number}")
        yield farm
