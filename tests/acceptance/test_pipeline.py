"""The pipeline as users see it: large layers, shared pools, lost workers, changed caps, Ctrl-C."""

import asyncio
import signal
import sys
import time
from pathlib import Path

import asyncpg
import msgspec
import pytest

from rota.engine.submission.submitter import Submitter, submit_on_async
from rota.infra.postgres import Database, PostgresTarget
from rota.model.jobs.submission import LayerSpec, Submission
from tests.chaos.pipeline.deployment import STUCK
from tests.chaos.pipeline.deployment import Farm as ProcessFarm
from tests.chaos.pipeline.history import violations
from tests.support.harness.effort import effort
from tests.support.harness.made_data import copy_made
from tests.support.harness.servers import options_for_tests
from tests.support.jobs import NO_EVENTS
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm, hanging, seen
from tests.support.waiting import until

CORES = sql("SELECT pk_show::text AS show, sum(int_cores_reserved)::bigint AS cores FROM rota.proc GROUP BY 1")
WRITTEN = sql("""
SELECT (SELECT count(*) FROM rota.job) + (SELECT count(*) FROM rota.layer) + (SELECT count(*) FROM rota.ready_entries)
     + (SELECT count(*) FROM rota.idempotency_key) + (SELECT count(*) FROM rota.outbox)""")


@pytest.fixture
async def farm(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as farm:
        yield farm
        await farm.quiet()


class Peak:
    """Peak number of booked cores per show, sampled continuously."""

    def __init__(self, database):
        self.cores = {}
        self._database = database
        self._ended = asyncio.Event()

    async def __aenter__(self):
        self._sampling = asyncio.create_task(self._sample())
        return self

    async def __aexit__(self, *_failure):
        self._ended.set()
        await self._sampling

    async def _sample(self):
        while not self._ended.is_set():
            for row in await self._database.rows(CORES):
                self.cores[row["show"]] = max(self.cores.get(row["show"], 0), row["cores"])
            await asyncio.sleep(0.002)


FRAMES = effort(2_000, 10_000)


async def test_thousands_of_frames_complete_within_the_burst_cap(farm):
    await farm.show(burst=50)
    await farm.worker(slots=400)
    async with Peak(farm.database) as peak:
        job = await farm.submit("note", frames=FRAMES)
        assert await farm.ended(job, within_s=60) == "SUCCEEDED"
    assert sorted(seen["note"]) == [(frame, 1) for frame in range(FRAMES)]
    [layer] = (await farm.done(job))["layers"]
    assert (layer["frames"], layer["succeeded"]) == (FRAMES, FRAMES)
    [most] = peak.cores.values()
    assert 0 < most <= 5000


async def test_two_shows_share_a_pool_within_their_caps(farm):
    await farm.show("film", size=30, burst=40)
    await farm.show("short", size=10, burst=15)
    gate = hanging("x")
    jobs = [await farm.submit("hang", "x", show=show, frames=60) for show in ("film", "short")]
    pending_queues = farm.replica.engine.dispatcher.pending_queues
    await until(lambda: pending_queues.shows_waiting() == 2, what="both shows waiting")
    await farm.worker(slots=40)
    await farm.running("x", 40)
    shows = {str(show.id): show.name for show in await farm.accounting.admin.shows()}
    used = {shows[row["show"]]: row["cores"] for row in await farm.database.rows(CORES)}
    assert used == {"film": 3000, "short": 1000}, "each show gets its subscription size"
    async with Peak(farm.database) as peak:
        gate.set()
        assert [await farm.ended(job) for job in jobs] == ["SUCCEEDED", "SUCCEEDED"]
    assert all(cores <= {"film": 4000, "short": 1500}[shows[show]] for show, cores in peak.cores.items())


async def test_raised_cap_starts_waiting_frames_within_two_seconds(farm):
    await farm.show(burst=1)
    await farm.worker(slots=20)
    gate = hanging("x")
    job = await farm.submit("hang", "x", frames=10)
    await farm.running("x", 1)
    await until(
        lambda: farm.replica.engine.dispatcher.pending_queues.frames_by_reason().get("quota_subscription"),
        what="a wait reason",
    )
    began = time.monotonic()
    await farm.accounting.change(lambda admin: admin.change_subscription("film", "local", burst=10, actor="test"))
    await farm.running("x", 10)
    assert time.monotonic() - began < 2
    gate.set()
    assert await farm.ended(job) == "SUCCEEDED"


async def test_submission_in_a_rolled_back_transaction_leaves_no_rows(farm, database_url):
    await farm.show()
    await farm.worker()
    await farm.ended(await farm.submit("noop", frames=3))  # the first job creates the queue permanently
    before = await farm.database.value(WRITTEN)
    submission = Submission(
        show="film", layers=(LayerSpec(task="note", frames=7),), idempotency_key="once", max_cores=1
    )
    connection = await asyncpg.connect(database_url)
    try:
        transaction = connection.transaction()
        await transaction.start()
        (submitted,) = await submit_on_async(connection, [submission])
        await transaction.rollback()
        assert await farm.database.value(WRITTEN) == before
        async with connection.transaction():
            (again,) = await submit_on_async(connection, [submission])
    finally:
        await connection.close()
    assert again.job != submitted.job
    assert await farm.ended(again.job) == "SUCCEEDED"
    assert await farm.done(submitted.job) is None
    assert sorted(seen["note"]) == [(frame, 1) for frame in range(7)]


async def test_killed_worker_frames_restart_on_another_worker_within_seconds(private_stack, tmp_path, proxy):
    stack = await private_stack("postgres", "redis", "nats")
    async with ProcessFarm(stack, tmp_path, proxy, links=False) as farm:
        await farm.show("film")
        await farm.start(servers=1, workers=2, slots=4)
        await farm.submit("nap", 4, frames=8)
        await until(lambda: len(farm.read_runs()) == 8, within_s=15, what="all frames running")
        killed = farm.workers[0]
        lost = {run.frame for run in farm.read_runs() if run.worker == killed.name}
        assert lost
        await killed.kill()
        at = time.monotonic()
        await farm.add_worker("spare", slots=8)

        def restarted():
            return {run.frame for run in farm.read_runs() if run.frame in lost and run.attempt > 1} == lost

        await until(restarted, within_s=20, what="its frames on another worker")
        restart_s = max(run.began for run in farm.read_runs() if run.attempt > 1) - at
        await farm.quiet(within_s=30)
        assert not violations(await farm.history())
        assert restart_s <= 8, f"frames restarted after {restart_s:.1f} s"


class Up:
    """`rota up` and separate workers in a private directory."""

    def __init__(self, spawn, folder, made_data):
        self.spawn = spawn
        self.data = folder / "data"
        copy_made(made_data, self.data)
        self.runs = folder / "runs"
        self.runs.mkdir()
        bins = {f"ROTA_LOCAL_{name.upper()}_BIN": path for name, path in options_for_tests(folder).bins.items()}
        self.env = {
            "ROTA_LISTEN_PORT": "0",
            "ROTA_GRPC_PORT": "0",
            "ROTA_LOCAL_DATA_DIR": str(self.data),
            "ROTA_LOG_LEVEL": "error",
            "ROTA_WORKER_DRAIN_TIMEOUT": "2s",
            "RUNS": str(self.runs),
            "WORKER_NAME": "w",
            **bins,
        }

    async def start(self, *args):
        return await self.spawn(None, argv=[sys.executable, "-m", "rota.cli", *args], env=self.env, fork=False)

    async def ready(self, process):
        assert "Rota is up" in await process.line(60)
        return msgspec.json.decode((self.data / "up.json").read_bytes())["urls"]["postgres"]

    def remaining_processes(self):
        """Live processes that refer to this data directory."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                text = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
                dead = (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                continue
            if str(self.data).encode() in text and not dead:
                found.append((folder.name, text[:80]))
        return found


@pytest.mark.slow("starts a full installation four times in sequence")
@pytest.mark.timeout(180)
async def test_ctrl_c_at_any_time_leaves_no_process_and_loses_no_job(spawn, tmp_path, made_data):
    rota = Up(spawn, tmp_path, made_data)
    jobs = []
    for moment_s in (0.1, 0.9, None):
        up = await rota.start("up", *(["--no-worker"] if moment_s is None else []))
        if moment_s is None:
            jobs += await _submit(await rota.ready(up))
            worker = await rota.start("worker", "tests/chaos/pipeline/tasks.py:app", "--slots", "2", "--cores", "2")
            await until(lambda: list(rota.runs.iterdir()), within_s=30, what="a running frame")
            worker.send(signal.SIGINT)
            assert await worker.wait(20) == 0
        else:
            await asyncio.sleep(moment_s)  # the point of interruption is what is tested
        up.send(signal.SIGINT)
        assert await up.wait(40) in (0, 130, -signal.SIGINT)
        await until(lambda: not rota.remaining_processes(), within_s=10, what=f"no process left ({moment_s})")

    up = await rota.start("up", "--no-worker")
    url = await rota.ready(up)
    worker = await rota.start("worker", "tests/chaos/pipeline/tasks.py:app", "--slots", "50", "--cores", "50")
    database = await Database.open(PostgresTarget(url=url))
    states = sql("SELECT pk_job, state FROM rota.job_done WHERE pk_job = ANY ($1::uuid[])")
    try:

        async def ended():
            return [row["state"] for row in await database.rows(states, jobs)] == ["SUCCEEDED"] * len(jobs)

        try:
            await until(ended, within_s=60, what="the end of all jobs")
        except AssertionError as error:
            stuck = [dict(row.items()) for row in await database.rows(STUCK)]
            raise AssertionError(f"{error}\n{stuck}") from None
    finally:
        await database.close()
    for process in (worker, up):
        process.send(signal.SIGINT)
        assert await process.wait(40) == 0
    await until(lambda: not rota.remaining_processes(), within_s=10, what="no process left")


async def _submit(url):
    database = await Database.open(PostgresTarget(url=url))
    try:
        naps = LayerSpec(task="nap", input={"args": [0.3], "kwargs": {}}, frames=12)
        submitted = await Submitter(database, NO_EVENTS).submit([Submission(show="default", layers=(naps,))] * 3)
    finally:
        await database.close()
    return [each.job for each in submitted]
