"""The demo's farm: servers of its own, a replica in this process, and workers as processes that can be killed."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final
from uuid import UUID

import msgspec

from rota import runtime
from rota.accounting.admin import QuotaAdmin
from rota.accounting.resources import QuotaItem, Show
from rota.accounting.usage import ShowUsage
from rota.agents import admin as agents_admin
from rota.api.agents import AgentRunView
from rota.cli.local.embedded_worker import spawn_worker
from rota.engine.outputs.review import OutputReview, OutputReviewer
from rota.engine.queries.jobs import JobQueries, JobView
from rota.engine.queries.workers import WorkerRecord
from rota.engine.queries.workers import worker_records as known_workers
from rota.infra.postgres import migrate
from rota.local import LocalStack, StackOptions
from rota.local.process import ChildProcess
from rota.model.ids import JobId
from rota.model.jobs.submission import Submission
from rota.model.quota import Level
from rota.model.settings import Settings

APP: Final = "rota.demo.tasks:app"
ACTOR: Final = "demo"
DRAIN_TIMEOUT_S: Final = 20.0


class DemoSnapshot(msgspec.Struct, frozen=True):
    """The farm at one moment."""

    jobs: dict[str, JobView]
    workers: list[WorkerRecord]
    shares: dict[str, list[QuotaItem]]
    """Subscriptions by the name of their show, with what Redis counts."""

    @property
    def busy_workers(self) -> set[UUID]:
        """Workers on which something is booked, or that are up."""
        return {worker.id for worker in self.workers if worker.frames or worker.ended_at is None}

    def used_cores(self, show: str, pool: str) -> int:
        """Cores in hundredths."""
        return next(share.usage.cores for share in self.shares[show] if share.name == pool)


class DemoStack:
    def __init__(self, stack: LocalStack, replica: runtime.Replica, folder: Path) -> None:
        self.stack = stack
        self.replica = replica
        self.books = replica.accounting
        self.database = replica.database
        self.jobs = JobQueries(replica.database)
        self.submitted: dict[str, JobId] = {}
        self.processes: dict[str, ChildProcess] = {}
        self.migrations = 0
        self._submitter = replica.engine.submitter
        self._folder = folder

    @classmethod
    @asynccontextmanager
    async def open(cls, folder: Path, policy: str) -> AsyncIterator[DemoStack]:
        rules = folder / "policy.yaml"
        rules.write_text(policy)
        async with AsyncExitStack() as closing:
            stack = LocalStack(StackOptions(folder))
            closing.push_async_callback(stack.stop)
            await stack.start()
            applied = await migrate(stack.url("postgres"))
            urls = runtime.ServerUrls(**{name: stack.url(name) for name in runtime.SERVERS})
            replica = await closing.enter_async_context(runtime.Replica.open(_settings(rules), urls))
            replica.supervisor.add(stack.service)
            await closing.enter_async_context(replica.supervisor.running())
            farm = cls(stack, replica, folder)
            farm.migrations = len(applied)
            closing.push_async_callback(farm.stop_workers)
            yield farm

    def start_worker(self, name: str, *, pool: str, cores: int, gpus: int = 0) -> None:
        words = [APP, "--name", name, "--pool", pool, "--cores", str(cores), "--gpus", str(gpus)]
        found = {f"ROTA_{server.upper()}_URL": self.stack.url(server) for server in runtime.SERVERS}
        found |= {
            "ROTA_WORKER_WORK_DIR": str(self._folder / "work"),
            "ROTA_REDIS_SCHEDULER_REFRESH_PERIOD_SECONDS": "2",
        }
        self.processes[name] = spawn_worker(words, os.environ | found, self._folder / f"worker-{name}.log")

    def kill_worker(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGKILL)

    async def stop_workers(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            if not await process.wait(DRAIN_TIMEOUT_S):
                process.send_signal(signal.SIGKILL)
                await process.wait(1.0)

    async def create_show(self, name: str, shares: dict[str, tuple[int, int, int]]) -> None:
        """A show that Redis keeps the books of, with shares of pools: size, burst, GPUs."""
        change = self.books.change
        known = {item.name for item in [*await self.books.admin.pools(), *await self.books.admin.depts()]}
        for pool in shares.keys() - known:
            await change(partial(QuotaAdmin.create_pool, name=pool, actor=ACTOR))
        if "default" not in known:
            await change(partial(QuotaAdmin.create_dept, name="default", actor=ACTOR))
        await change(partial(QuotaAdmin.create_show, name=name, managed=True, actor=ACTOR))
        await change(partial(QuotaAdmin.create_folder, show=name, name="default", actor=ACTOR))
        for pool, (size, burst, gpus) in shares.items():
            share = partial(QuotaAdmin.create_subscription, show=name, pool=pool, actor=ACTOR)
            await change(partial(share, size=size, burst=burst, gpu_burst=gpus))

    async def submit(self, given: Submission) -> JobId:
        [submitted] = await self._submitter.submit([given])
        self.submitted[given.name] = submitted.job
        return submitted.job

    async def first_result(self, name: str) -> object:
        """What the first frame of a job returned, as anybody may read it."""
        job = await self.jobs.get(self.submitted[name])
        [end] = await self.jobs.frame_ends(job.layers[0].id, most=1)
        return None if end.value is None else msgspec.msgpack.decode(end.value)

    async def redact_output(self, name: str) -> None:
        """As an operator would who did not submit it."""
        desk = OutputReview(self.database, self.replica.engine.store, self.replica.queue, self.replica.engine.finisher)
        [kept] = await desk.page(job=self.submitted[name])
        await desk.redact(kept.id, OutputReviewer(ACTOR, (ACTOR,)), "the key is nobody's business")

    async def agent_runs(self, agent: str) -> Sequence[AgentRunView]:
        """The last runs of an agent, in the order in which they began."""
        keys = self.replica.settings.redis.scheduler.keys
        admin = agents_admin.AgentAdmin(self.database, self.replica.agents, keys, ACTOR)
        return sorted(await admin.history(agent), key=lambda run: run.started)

    async def snapshot(self) -> DemoSnapshot:
        jobs = {name: await self.jobs.get(job) for name, job in self.submitted.items()}
        # Read anew: with the fence that holds now, without which Redis is not believed.
        shares = {show.name: await self._subscriptions(show) for show in await self.books.admin.shows()}
        return DemoSnapshot(jobs, await known_workers(self.database, everyone=True), shares)

    async def _subscriptions(self, show: Show) -> list[QuotaItem]:
        counting = await ShowUsage.of(self.books, show)
        return list(counting.with_usage(Level.SUBSCRIPTION, await self.books.admin.subscriptions(show.name)))


def _settings(rules: Path) -> Settings:
    plain = Settings()
    return msgspec.structs.replace(
        plain,
        listen=msgspec.structs.replace(plain.listen, port=0),
        policy=msgspec.structs.replace(plain.policy, file=str(rules)),
        output_policy=msgspec.structs.replace(plain.output_policy, enabled=True),
    )
