"""The demo's stack: its own servers, a replica in this process, and worker processes that can be killed."""

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
from rota.api.jobs import JobView
from rota.cli.local.embedded_worker import spawn_worker
from rota.engine.outputs.review import OutputReview, OutputReviewer
from rota.engine.queries.jobs import JobQueries
from rota.engine.queries.workers import WorkerRecord
from rota.engine.queries.workers import worker_records as known_workers
from rota.infra.postgres import migrate
from rota.local import LocalStack, StackOptions
from rota.local.process import ChildProcess
from rota.model.identity.principals import Principal
from rota.model.ids import JobId
from rota.model.jobs.submission import Submission
from rota.model.quota import Level
from rota.model.settings import Settings

APP: Final = "rota.demo.tasks:app"
ACTOR: Final = "demo"
DRAIN_TIMEOUT_S: Final = 20.0


class DemoSnapshot(msgspec.Struct, frozen=True):
    """State of the stack at one moment."""

    jobs: dict[str, JobView]
    workers: list[WorkerRecord]
    shares: dict[str, list[QuotaItem]]
    """Subscriptions by name of the show, with their usage in Redis."""

    @property
    def busy_workers(self) -> set[UUID]:
        """Workers that are up or have bookings."""
        return {worker.id for worker in self.workers if worker.frames or worker.ended_at is None}

    def used_cores(self, show: str, pool: str) -> int:
        """Centicores in use."""
        return next(share.usage.cores for share in self.shares[show] if share.name == pool)


class DemoStack:
    def __init__(self, stack: LocalStack, replica: runtime.Replica, folder: Path) -> None:
        self.stack = stack
        self.replica = replica
        self.accounting = replica.accounting
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
            cluster = cls(stack, replica, folder)
            cluster.migrations = len(applied)
            closing.push_async_callback(cluster.stop_workers)
            yield cluster

    def start_worker(self, name: str, *, pool: str, cores: int, gpus: int = 0) -> None:
        args = [APP, "--name", name, "--pool", pool, "--cores", str(cores), "--gpus", str(gpus)]
        env = {f"ROTA_{server.upper()}_URL": self.stack.url(server) for server in runtime.SERVERS}
        env |= {
            "ROTA_WORKER_WORK_DIR": str(self._folder / "work"),
            "ROTA_REDIS_SCHEDULER_REFRESH_PERIOD_SECONDS": "2",
        }
        self.processes[name] = spawn_worker(args, os.environ | env, self._folder / f"worker-{name}.log")

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
        """Create a managed show with shares of pools: size, burst, GPUs."""
        change = self.accounting.change
        known = {item.name for item in [*await self.accounting.admin.pools(), *await self.accounting.admin.depts()]}
        for pool in shares.keys() - known:
            await change(partial(QuotaAdmin.create_pool, name=pool, actor=ACTOR))
        if "default" not in known:
            await change(partial(QuotaAdmin.create_dept, name="default", actor=ACTOR))
        await change(partial(QuotaAdmin.create_show, name=name, managed=True, actor=ACTOR))
        await change(partial(QuotaAdmin.create_folder, show=name, name="default", actor=ACTOR))
        for pool, (size, burst, gpus) in shares.items():
            share = partial(QuotaAdmin.create_subscription, show=name, pool=pool, actor=ACTOR)
            await change(partial(share, size=size, burst=burst, gpu_burst=gpus))

    async def submit(self, submission: Submission) -> JobId:
        [submitted] = await self._submitter.submit([submission])
        self.submitted[submission.name] = submitted.job
        return submitted.job

    async def first_result(self, name: str) -> object:
        """Return value of a job's first frame, as any reader gets it; None if it is withheld."""
        job = await self.jobs.get(self.submitted[name])
        [end] = await self.jobs.frame_ends(job.layers[0].id, most=1)
        return None if end.value is None else msgspec.msgpack.decode(end.value)

    async def redact_output(self, name: str) -> None:
        """Redact as an operator who did not submit the job."""
        review = OutputReview(
            self.database, self.replica.engine.store, self.replica.queue, self.replica.engine.completions
        )
        [output] = await review.page(job=self.submitted[name])
        await review.redact(output.id, OutputReviewer(ACTOR, Principal(ACTOR)), "contains a key")

    async def agent_runs(self, agent: str) -> Sequence[AgentRunView]:
        """The last runs of an agent, by start time."""
        keys = self.replica.settings.redis.scheduler.keys
        admin = agents_admin.AgentAdmin(self.database, self.replica.agents, keys, ACTOR)
        return sorted(await admin.history(agent), key=lambda run: run.started)

    async def snapshot(self) -> DemoSnapshot:
        jobs = {name: await self.jobs.get(job) for name, job in self.submitted.items()}
        # Read the shows again: Redis is only trusted under the current fence.
        shares = {show.name: await self._subscriptions(show) for show in await self.accounting.admin.shows()}
        return DemoSnapshot(jobs, await known_workers(self.database, everyone=True), shares)

    async def _subscriptions(self, show: Show) -> list[QuotaItem]:
        usage = await ShowUsage.of(self.accounting, show)
        return list(usage.with_usage(Level.SUBSCRIPTION, await self.accounting.admin.subscriptions(show.name)))


def _settings(rules: Path) -> Settings:
    defaults = Settings()
    return msgspec.structs.replace(
        defaults,
        listen=msgspec.structs.replace(defaults.listen, port=0),
        policy=msgspec.structs.replace(defaults.policy, file=str(rules)),
        output_policy=msgspec.structs.replace(defaults.output_policy, enabled=True),
    )
