"""A cluster of real processes: `rota` servers and workers on private PostgreSQL, Redis and NATS servers, connected
through proxies that can fail.

    async with Farm(stack, folder, proxy) as farm:
        await farm.start(servers=2, workers=3)
        await farm.submit("noop", frames=10)
        await farm.quiet()
        assert not violations(await farm.history())

Administration and sampling by the test bypass the proxies; submissions do not.
"""

import asyncio
import itertools
import json
import os
import signal
import sys
import time
import urllib.request
from collections import Counter
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec

from rota.accounting.audit import audit
from rota.accounting.live.reconcile import reconcile_show
from rota.accounting.service import AccountingService
from rota.engine.submission.submitter import Submitter
from rota.infra.nats import Bus, NatsTarget
from rota.infra.nats.topology import streams
from rota.infra.postgres import Database, PostgresTarget, migrate
from rota.infra.redis import RedisTarget, connect
from rota.local.datadir import _free_port as free_port
from rota.model.access import GrantSpec, Role
from rota.model.errors import PostgresUnavailable, RedisUnavailable
from rota.model.jobs.submission import LayerSpec, Submission, encode_submission
from rota.model.protocol import SUBMIT_SUBJECT
from rota.model.quota import Usage
from rota.model.settings.servers import NatsSettings
from rota.queue import Queue
from rota.queue.dead_letters import REMOVE_MAX, DeadLetterFilter
from rota.server.access import ApiKeyStore
from tests.chaos.pipeline import invariants, wal
from tests.chaos.pipeline.history import COUNTED, Done, End, History, Layer, Run, Submit
from tests.chaos.pipeline.poison_messages import Poisoner, text_of
from tests.support.harness import processes
from tests.support.jobs import NO_EVENTS
from tests.support.queue import EXACT, FIELDS, SCAN, sql
from tests.support.waiting import until

ROOT = Path(__file__).parents[3]
APP = "tests/chaos/pipeline/tasks.py:app"
DONE = sql("""
SELECT pk_job::text, state, rota.job_history_shown(history, state, ts_submitted, ts_finished) AS history, layers
FROM rota.job_done""")
ENDS = sql("SELECT pk_layer::text, frame, attempt, token, state, code FROM rota.frame_end")
KEYS = sql("SELECT key, pk_job::text FROM rota.idempotency_key")
LEFT = sql("""
SELECT (SELECT count(*) FROM rota.proc) AS procs, (SELECT count(*) FROM rota.job) AS "live jobs",
       (SELECT count(*) FROM rota.layer) AS "live layers", (SELECT count(*) FROM rota.deferred_jobs) AS deferred,
       (SELECT coalesce(sum(waiting), 0)::int FROM rota.queue_counts_scan()) AS waiting,
       (SELECT coalesce(sum(running), 0)::int FROM rota.queue_counts_scan()) AS running""")
STUCK = sql("""
SELECT j.str_name, j.state, j.reason, j.ends_as, j.dispatch_failures, l.frames, l.succeeded, l.failed, l.queue,
       (SELECT array_agg(r.n || CASE WHEN r.parked_job IS NULL THEN ' returned' ELSE ' parked' END)
        FROM rota.queue_returned r JOIN rota.queue_lanes a ON a.lane_id = r.lane_id WHERE a.queue = l.queue) AS returned
FROM rota.job j JOIN rota.layer l ON l.pk_job = j.pk_job LIMIT 10""")
UP = sql("SELECT count(DISTINCT str_name) FROM rota.worker WHERE state = 'up'")
LIVE_SESSIONS = sql("SELECT count(*) FROM rota.worker WHERE state = 'up' AND str_name = $1")
LAST = sql("SELECT pg_current_snapshot()::text")
POLL_S = 0.05
"""Poll interval of waits: low enough to be quick, high enough not to load the servers."""
START_S = 45.0
"""Generous for slow, busy machines: the bound only ends a hang, before the test runs out of time without a word."""
LAST_CHARS = 1500


class Actor:
    """A cluster process that can be restarted under the same name."""

    def __init__(self, name, args, env, folder, module="rota.cli"):
        self.name = name
        self.folder = folder
        self._command = [sys.executable, "-m", module, *args]
        self._env = {**os.environ, **env}
        self._starts = itertools.count(1)
        self.process = None
        self.stopped = False
        self.started_at = 0.0
        """Of its last start, by the system's clock."""

    async def start(self, **arm):
        """`arm` holds failpoint variables such as CRASH_AT."""
        self.started_at = time.time()
        self.log = self.folder / f"{self.name}.{next(self._starts)}.log"
        with self.log.open("wb") as out:
            self.process = await processes.start(self._command, stdout=out, stderr=out, env=self._env | arm, cwd=ROOT)
        return self

    @property
    def pid(self):
        return self.process.pid

    @property
    def alive(self):
        return self.process is not None and self.process.returncode is None

    def send(self, number):
        if self.alive:
            os.kill(self.pid, number)
            self.stopped = number == signal.SIGSTOP

    async def kill(self):
        self.send(signal.SIGKILL)
        await self.process.wait()

    async def wait(self, timeout_s=30.0):
        async with asyncio.timeout(timeout_s):
            return await self.process.wait()

    def all_logs(self):
        """The logs of all its starts."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob(f"{self.name}.*.log")))


class Farm:
    def __init__(self, stack, folder, proxy, *, links=True):
        self.stack = stack
        self.folder = Path(folder)
        self.runs = self.folder / "runs"
        self.servers = []
        self.workers = []
        self.links = {}
        self.submits = []
        self.commits = []
        self.counts = []
        self.ledger_samples = []
        self.wipes = 0
        """How often JetStream lost all its data."""
        self.reached = Counter()
        """Highest seen value of each metric, and outages seen by the sampler."""
        self._api_key = None
        self.pruned = False
        self._proxy = proxy
        self._linked = links
        self._sampling = None
        self._keys = itertools.count(1)
        self._records_commits = False
        self._read_until = 0
        self._reading = asyncio.Lock()

    async def __aenter__(self):
        self.runs.mkdir(parents=True, exist_ok=True)
        self.urls = {name: self.stack.url(name) for name in ("postgres", "redis", "nats")}
        await migrate(self.urls["postgres"])
        self.database = await Database.open(PostgresTarget(url=self.urls["postgres"], pool_max=6))
        self.client = connect(RedisTarget(url=self.urls["redis"]))
        self.accounting = AccountingService(self.database, self.client)
        return self

    async def __aexit__(self, *_failure):
        if self._sampling is not None:
            self._sampling.cancel()
            await asyncio.wait([self._sampling])
        for actor in (*self.workers, *self.servers):
            if actor.alive:
                await actor.kill()
        if hasattr(self, "submitting"):
            await self.submitting.close()
            await self.bus.close()
        await self.client.aclose()
        await self.database.close()

    async def keep_commits(self):
        """Record commits for A1, A4 and F1; call it before anything is booked."""
        await wal.begin(self.database, self.stack.servers["postgres"])
        await until(self._answers, what="PostgreSQL after its restart")
        await wal.make(self.database)
        self._records_commits = True

    async def _answers(self):
        try:
            return await self.database.value(sql("SELECT 1"))
        except PostgresUnavailable:
            return False

    async def show(self, name, *, pool="local", size=100, burst=100, managed=True):
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

    async def start(self, *, servers=2, workers=3, slots=8, heartbeat_s=2.0, worker=None):
        """`worker`: more arguments of `add_worker`."""
        await self._link("test", "postgres")
        url = self.links["test", "postgres"].url(self.urls["postgres"]) if self._linked else self.urls["postgres"]
        self.submitting = await Database.open(
            PostgresTarget(url=url, connect_timeout_s=1, acquire_timeout_s=1, statement_timeout_s=2, pool_min=0)
        )
        self.bus = await Bus.connect(NatsTarget(url=self.urls["nats"]))
        await self.bus.ensure(streams(NatsSettings()))
        self.poisoner = Poisoner(self.bus, lambda: self.wipes)
        for number in range(servers):
            await self.add_server(f"server{number}", heartbeat_s=heartbeat_s)
        for number in range(workers):
            await self.add_worker(f"worker{number}", slots=slots, **(worker or {}))
        if servers:
            await self.until_workers(workers)
        self._sampling = asyncio.create_task(self._sample_periodically())

    async def add_server(self, name, *, heartbeat_s=2.0, module="rota.cli", **env):
        port = free_port()
        env = {
            "ROTA_LISTEN_PORT": str(port),
            "ROTA_GRPC_PORT": str(free_port()),
            "ROTA_LOG_FORMAT": "json",
            "ROTA_WORKER_HEARTBEAT_INTERVAL": f"{heartbeat_s}s",
            **{f"ROTA_{kind.upper()}_URL": await self._url(name, kind) for kind in self.urls},
            **env,
        }
        server = Actor(name, ["server"], env, self.folder, module)
        server.port = port
        self.servers.append(server)
        return await server.start()

    async def add_worker(self, name, *, slots=8, pool="local", app=APP, **env):
        env = {
            "ROTA_NATS_URL": await self._url(name, "nats"),
            "ROTA_LOG_FORMAT": "json",
            "ROTA_WORKER_DRAIN_TIMEOUT": "5s",
            "ROTA_WORKER_PROCESSES": "2",
            "RUNS": str(self.runs),
            "WORKER_NAME": name,
            **env,
        }
        args = ["worker", app, "--name", name, "--pool", pool, "--slots", str(slots), "--cores", str(slots)]
        worker = Actor(name, [*args, "--memory", "64GiB", "--gpus", "0"], env, self.folder)
        worker.slots = slots
        self.workers.append(worker)
        return await worker.start()

    async def until_workers(self, number, within_s=START_S):
        async def all_up():
            return await self.database.value(UP) >= number

        try:
            await until(all_up, within_s=within_s, what=f"{number} workers")
        except AssertionError as error:
            error.add_note(self.last_lines())
            raise

    def last_lines(self):
        """How the processes are and what they logged last, for a report."""
        return "\n".join(
            f"== {actor.name}, status {actor.process and actor.process.returncode}\n{actor.all_logs()[-LAST_CHARS:]}"
            for actor in (*self.servers, *self.workers)
        )

    async def is_lost(self, worker):
        """Whether the servers have declared every session of this worker lost."""
        try:
            return not await self.database.value(LIVE_SESSIONS, worker)
        except PostgresUnavailable:
            return False

    async def _link(self, name, kind):
        if self._linked and (name, kind) not in self.links:
            at = urlsplit(self.urls[kind])
            self.links[name, kind] = await self._proxy(at.hostname, at.port)

    async def _url(self, name, kind):
        if not self._linked:
            return self.urls[kind]
        await self._link(name, kind)
        return self.links[name, kind].url(self.urls[kind])

    async def submit(
        self, task, *args, show="film", frames=1, ends=("SUCCEEDED",), layer=None, tries=30, gate=None, **more
    ):
        """Submit one job under a new key, retrying until it is acknowledged or `tries` are used up."""
        submit = Submit(f"k{next(self._keys)}", frames, ends)
        self.submits.append(submit)
        given = {"args": list(args), "kwargs": {}} if args else None
        spec = LayerSpec(task=task, input=given, frames=frames, **(layer or {}))
        submission = Submission(show=show, layers=(spec,), idempotency_key=submit.key, **more)
        for _ in range(tries):
            try:
                (submitted,) = await Submitter(self.submitting, NO_EVENTS, gate=gate).submit([submission])
            except PostgresUnavailable:
                await asyncio.sleep(0.2)
            else:
                submit.jobs.append(str(submitted.job))
                return submitted.job
        return None

    async def submit_on_bus(self, task, frames=1):
        """Submit by message. Once stored by NATS it counts as acknowledged, unless JetStream is wiped."""
        submit = Submit(f"bus{next(self._keys)}", frames)
        self.submits.append(submit)
        submission = Submission(show="film", layers=(LayerSpec(task=task, frames=frames),), idempotency_key=submit.key)
        await self.poisoner.publish(SUBMIT_SUBJECT, encode_submission(submission), submit.key)

    async def quiet(self, within_s=60.0):
        """Wait until no frame is queued or booked and no job is live."""

        async def is_quiet():
            left = await self._left()
            return not any(left.values())

        try:
            await until(is_quiet, within_s=within_s, what="an idle cluster", every_s=POLL_S)
        except AssertionError as error:
            stuck = [dict(row.items()) for row in await self.database.rows(STUCK)]
            raise AssertionError(f"{error}: {await self._left()}\n{stuck}") from None

    async def _left(self):
        return dict((await self.database.row(LEFT)).items())

    async def _sample_periodically(self):
        """Periodically sample counts, ledger and server metrics."""
        for number in itertools.count():
            try:
                await self.sample(number)
            except (PostgresUnavailable, OSError):
                self.reached["postgres away"] += 1
            except RedisUnavailable:
                self.reached["redis away"] += 1
            await asyncio.sleep(0.25)

    async def sample(self, number=0):
        counts = await self._counted()
        if counts is not None:
            self.counts.append(counts)
        self.ledger_samples += await invariants.sample_ledger(self.accounting, self.client)
        if self._records_commits and number % 8 == 0:
            await self._read_commits()
        if number % 4 == 0:
            for server in self.servers:
                if server.alive and not server.stopped:
                    await self._scrape(server)

    async def _counted(self):
        """Exact and scanned counts with no commit in between; None if commits kept interfering."""
        for _ in range(5):
            before = await self.database.value(LAST)
            exact = await self.database.rows(EXACT)
            scanned = await self.database.rows(SCAN)
            if await self.database.value(LAST) == before:
                return _counts(exact), _counts(scanned)
        return None

    async def _read_commits(self):
        managed = {str(show) for show in await self.accounting.managed_shows()}
        async with self._reading:
            before = self._read_until
            commits, self._read_until = await wal.read(self.database, managed, before)
            self.commits += commits
            if self._read_until > before:
                await wal.confirm(self.database, self._read_until)

    async def _key(self):
        if self._api_key is None:
            made = await ApiKeyStore(self.database).create(
                f"farm-{uuid4().hex}", [GrantSpec(Role.VIEWER)], actor="test"
            )
            self._api_key = made.plain.text
        return self._api_key

    async def _scrape(self, server):
        try:
            text = await asyncio.to_thread(_fetch, f"http://127.0.0.1:{server.port}/metrics", await self._key())
        except (OSError, HTTPException):
            return
        for line in text.splitlines():
            name, _, number = line.rpartition(" ")
            if name and not line.startswith("#") and "_created" not in name:
                metric = (server.log.name, name)
                self.reached[metric] = max(self.reached[metric], float(number))

    def metric(self, name):
        """The sum over all starts of all servers, as far as scraped."""
        return sum(
            value
            for known, value in self.reached.items()
            if isinstance(known, tuple) and known[1].split("{")[0].removesuffix("_total") == name
        )

    def logged(self, event):
        return sum(actor.all_logs().count(f'"{event}"') for actor in (*self.servers, *self.workers))

    async def history(self):
        """The complete history. Call it when the cluster is idle: it reconciles the ledger."""
        if self._sampling.done():
            self._sampling.result()
        audit_problems = await self._audit()
        if self._records_commits:
            await self._read_commits()
        await self.sample(1)
        dead_letters = await self._dead_letters()
        return History(
            submits=self.submits,
            keys={row["key"]: row["pk_job"] for row in await self.database.rows(KEYS)},
            done=[_done(row) for row in await self.database.rows(DONE)],
            ends=[End(*row.values()) for row in await self.database.rows(ENDS)],
            runs=self.read_runs(),
            commits=self.commits,
            left=await self._left(),
            audit_problems=audit_problems,
            counts=self.counts,
            ledger_samples=self.ledger_samples,
            messages=self.poisoner.sent,
            wipes=self.wipes,
            dead_letters=dead_letters,
            pruned=self.pruned,
        )

    async def _dead_letters(self):
        found = await Queue(self.database).dead_letters.find(DeadLetterFilter(kind="message"), most=REMOVE_MAX)
        return [text_of(dead_letter.payload) for dead_letter in found]

    async def _audit(self):
        lines = []
        for show in await self.accounting.admin.shows():
            if show.managed:
                await until(lambda s=show: self._reconciled(s), within_s=20, what=f"the reconciliation of {show.name}")
            found = await audit(self.accounting, show)
            if not found.ok:
                lines.append(f"the ledger of {show.name} is inconsistent: {found}")
            for line in found.lines:
                if (line.procs, line.redis or Usage()) != (Usage(), Usage()):
                    lines.append(f"{show.name} {line.level} {line.name}: redis {line.redis}, procs {line.procs}")
        return lines

    async def _reconciled(self, show):
        try:
            return await reconcile_show(self.accounting.live, show.id, grace_s=0) is not None
        except RedisUnavailable:
            return False

    def read_runs(self):
        runs, latest = [], {}
        for path in sorted(self.runs.glob("*.jsonl")):
            for line in path.read_bytes().splitlines():
                what, *about, at = msgspec.json.decode(line)
                if what == "began":
                    runs.append(Run(*about, at))
                    latest[runs[-1].token] = runs[-1]
                elif what == "raised":
                    latest[about[4]].raised = True
                else:
                    latest[about[4]].ended = at
        return runs


def _counts(rows):
    return {row["queue"]: plain for row in rows if any((plain := {field: row[field] for field in FIELDS}).values())}


def _done(row):
    layers = [
        Layer(str(layer["pk_layer"]), layer["frames"], {name: layer[name] for name in COUNTED})
        for layer in row["layers"]
    ]
    return Done(row["pk_job"], row["state"], [step[0] for step in json.loads(row["history"])], layers)


def _fetch(url, key):
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=0.5) as response:
        return response.read().decode()
