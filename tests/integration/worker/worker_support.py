"""Shared by the worker tests: a fake server on a real bus, an app with many kinds of tasks, and workers."""

import asyncio
import itertools
import os
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import msgspec

from rota.infra.nats import Bus, BusMessage, ConsumerSpec, NatsTarget
from rota.infra.nats.topology import streams
from rota.infra.service import Lifecycle
from rota.model.jobs.work import Work
from rota.model.protocol import (
    CANCEL_SUBJECT,
    HANDSHAKE_SUBJECT,
    HEARTBEAT_SUBJECT,
    JOBS_SUBJECT,
    LIVENESS_SUBJECT,
    LOG_SUBJECT,
    PROGRESS_SUBJECT,
    AssignedRange,
    Assignment,
    AttemptStatus,
    CancelFrames,
    Heartbeat,
    LogChunk,
    Progress,
    Register,
    Registered,
    Report,
    WorkerLiveness,
    decode,
    encode,
)
from rota.model.settings.servers import NatsSettings
from rota.sdk import load_app
from rota.worker.config import WorkerConfig
from rota.worker.registration_info import RegistrationInfo
from rota.worker.worker import Worker
from tests.support.waiting import until

ROOT = Path(__file__).parents[3]
APP = "tests/integration/worker/worker_tasks.py:app"
RESULTS = ConsumerSpec(stream="SYS", durable="engine", filter="sys.job.result", ack_wait_s=30)
DONE = (AttemptStatus.SUCCEEDED, "")


class FakeServer:
    """Answers registrations, sends assignments, and records every message of the workers."""

    def __init__(self, bus, lease_s=60.0, heartbeat_s=0.2, refusal="", confirms_liveness=True):
        self.bus = bus
        self.hellos = []
        self.heartbeats = {}
        self.reports = []
        self.ends = {}
        self.twice = []
        self.progress = []
        self.chunks = []
        self.workers = []
        self.confirms_liveness = confirms_liveness
        self._registered = Registered(None, heartbeat_s, lease_s, refusal)
        self._tokens = itertools.count(1000)
        self._numbers = itertools.count()

    async def serve(self):
        async with asyncio.TaskGroup() as tasks:
            handlers = {
                HANDSHAKE_SUBJECT: self._register,
                HEARTBEAT_SUBJECT: self._beat,
                PROGRESS_SUBJECT: self._progress,
                LOG_SUBJECT: self._log,
            }
            self.ready = [asyncio.Event() for _ in handlers]
            for (subject, handler), ready in zip(handlers.items(), self.ready, strict=True):
                tasks.create_task(self._subscribe(subject, handler, ready))
            tasks.create_task(self._results())
            tasks.create_task(self._confirm_liveness())

    async def _subscribe(self, subject, handler, ready):
        async with self.bus.subscribe_core(subject) as queue:
            ready.set()
            while True:
                await handler(await queue.get())

    async def _register(self, request):
        self.hellos.append(decode(Register, request.data))
        worker = None if self._registered.refusal else uuid4()
        if worker:
            self.workers.append(worker)
        await self.bus.respond(request, encode(msgspec.structs.replace(self._registered, worker=worker)))

    async def _beat(self, message):
        beat = decode(Heartbeat, message.data)
        self.heartbeats.setdefault(beat.worker, []).append(beat)

    async def _progress(self, message):
        self.progress.append(decode(Progress, message.data))

    async def _log(self, message):
        self.chunks.append(decode(LogChunk, message.data))

    async def _results(self):
        async with self.bus.consumer(RESULTS) as results:
            async for batch in results.batches(wait_s=5):
                for delivery in batch:
                    self._record_report(decode(Report, delivery.data))
                    await delivery.ack()

    def _record_report(self, report):
        self.reports.append(report)
        for first, n in report.done:
            for token in range(first, first + n):
                self._end(token, None)
        for end in report.ends:
            self._end(end.token, end)

    def _end(self, token, end):
        if token in self.ends:
            self.twice.append(token)
        self.ends[token] = end

    async def _confirm_liveness(self):
        while True:
            await asyncio.sleep(0.1)
            if self.confirms_liveness:
                await self.publish_liveness(heard=list(self.workers))

    async def publish_liveness(self, **message):
        await self.bus.publish_core(LIVENESS_SUBJECT, encode(WorkerLiveness(**message)))

    def tokens(self):
        return next(self._tokens) * 1000

    async def send(
        self, work, n=1, *, worker=None, args=(), kwargs=None, raw=None, token=None, attempt=1, pointer=None
    ):
        """Assign frames 1 to n of one layer; returns the first token."""
        if isinstance(work, str):
            work = Work(task=work, cores=1)
        token = self.tokens() if token is None else token
        given = raw if raw is not None else msgspec.msgpack.encode({"args": list(args), "kwargs": kwargs or {}})
        given = None if pointer else given
        portion = AssignedRange(token, n, uuid4(), uuid4(), 1, attempt, 0, given, pointer)
        await self.publish(encode(Assignment([work], [portion])), worker)
        return token

    async def publish(self, data, worker=None):
        subject = JOBS_SUBJECT.format(worker or self.workers[-1])
        await self.bus.publish(BusMessage(subject=subject, data=data, msg_id=f"a{next(self._numbers)}"))

    async def ended(self, token, n=1, within_s=15.0):
        """Wait for the ends of `n` frames; None for a frame that succeeded without a value."""
        tokens = range(token, token + n)
        await until(
            lambda: all(one in self.ends for one in tokens),
            within_s=within_s,
            what=f"the end of {n} frames from {token}",
        )
        ends = [self.ends[one] for one in tokens]
        return ends if n > 1 else ends[0]

    async def run(self, work, n=1, **more):
        """Send frames and wait for their ends."""
        return await self.ended(await self.send(work, n, **more), n)

    async def began(self, token):
        await until(
            lambda: any(first <= token < first + n for message in self.progress for first, n in message.started),
            what=f"the start of {token}",
        )

    async def cancel(self, token, n=1, reason="cancelled"):
        await self.bus.publish_core(CANCEL_SUBJECT, encode(CancelFrames([(token, n)], reason)))

    def beats(self, worker=None):
        return self.heartbeats.get(worker or self.workers[-1], [])

    async def held(self, token, worker=None):
        """Wait until a heartbeat lists the token."""
        await until(lambda: self.beats(worker) and token in tokens_of(self.beats(worker)[-1].held), what="a heartbeat")

    def output(self, token, stream="stdout"):
        """The log of a frame so far, in order, and the number of dropped bytes."""
        chunks = sorted((c for c in self.chunks if c.token == token and c.stream == stream), key=lambda c: c.at)
        return b"".join(chunk.data for chunk in chunks), sum(chunk.dropped for chunk in chunks)

    async def logged(self, token, stream="stdout"):
        """Like `output`, after the last chunk has arrived."""
        await until(
            lambda: any(c.token == token and c.stream == stream and c.last for c in self.chunks), what="the last chunk"
        )
        return self.output(token, stream)


def tokens_of(runs):
    return {token for first, n in runs for token in range(first, first + n)}


@asynccontextmanager
async def serving(nats_url, prefix, **more):
    bus = await Bus.connect(NatsTarget(url=nats_url, prefix=prefix))
    await bus.ensure([*streams(NatsSettings()), RESULTS])
    server = FakeServer(bus, **more)
    task = asyncio.create_task(server.serve())
    await until(lambda: hasattr(server, "ready") and all(ready.is_set() for ready in server.ready))
    try:
        yield server
    finally:
        task.cancel()
        await asyncio.wait([task])
        await bus.close()


def plan_for(folder, **more):
    offer = {"name": "w1", "pool": "local", "slots": 1000, "cores": 100_000, **more.pop("offer", {})}
    app = load_app.load(APP, ROOT)
    given = {
        "offer": RegistrationInfo(**offer),
        "tasks": app.tasks,
        "app": APP,
        "folder": ROOT,
        "work_dir": folder,
        "processes": 2,
        "drain_s": 5.0,
    }
    return WorkerConfig(**{**given, **more})


class Running:
    """A worker in this process."""

    def __init__(self, worker, server):
        self.worker = worker
        self.server = server
        self._draining = asyncio.Event()
        self.ready = asyncio.Event()
        self.task = asyncio.create_task(worker.run(Lifecycle(self._draining, self.ready.set)))

    async def until_ready(self):
        waiting = asyncio.create_task(self.ready.wait())
        await asyncio.wait({self.task, waiting}, return_when=asyncio.FIRST_COMPLETED, timeout=10)
        waiting.cancel()
        if self.task.done():
            self.task.result()
        assert self.ready.is_set(), "the worker did not become ready"
        await until(lambda: self.server.workers and self.server.beats(), what="the first heartbeat")
        return self

    async def drain(self, within_s=15):
        self._draining.set()
        async with asyncio.timeout(within_s):
            await self.task

    async def end(self):
        self._draining.set()
        if not self.task.done():
            self.task.cancel()
        await asyncio.wait([self.task])


def command(*argv, **more):
    return Work(argv=argv, **{"cores": 1, **more})


def task(name, **more):
    return Work(task=name, **{"cores": 1, **more})


@asynccontextmanager
async def workers(nats_url, prefix, server, folder):
    """Factory for workers in this process; stops them on exit."""
    started = []

    async def start(url=nats_url, **more):
        target = NatsTarget(url=url, prefix=prefix, publish_timeout_s=more.pop("publish_timeout_s", 2.0))
        running = Running(Worker(plan_for(folder, **more), target, streams(NatsSettings())), server)
        started.append(running)
        return await running.until_ready()

    yield start
    for running in started:
        await running.end()


def processes_of(parent=None):
    """Pids of all descendants."""
    parent = parent or os.getpid()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(status[1]) == parent and status[0] != "Z":
                found += [int(entry.name), *processes_of(int(entry.name))]
    return found


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
