"""Looks at a running cluster several times a second: compares what servers say with the tables, and measures how long
work waits.

    async with Watch(farm, disturbances) as watch:
        ...
    assert not watch.violations
"""

import asyncio
import itertools
import random
import time
from collections import Counter, deque
from uuid import uuid4

import httpx
import msgspec

from rota.api.explanation import JobExplanation
from rota.model.access import GrantSpec, Role
from rota.server.access import ApiKeyStore
from tests.chaos.pipeline.history import Violation
from tests.chaos.scenarios import truth
from tests.chaos.scenarios.facts import AWAY, Counts, FactsReader
from tests.chaos.scenarios.liveness import ClaimWatch, DispatchWatch, OrderWatch, Persistent, ended_processes
from tests.chaos.scenarios.trace import Trace
from tests.chaos.scenarios.truth import JOB_STATES, QUEUE_STATES, Gauges, Look

LOOK_INTERVAL_S = 0.25
ANSWER_TIMEOUT_S = 1.0
READY_AFTER_S = 2.0
"""A worker session counts as free capacity once it is this old."""
EXPLAINED_MAX = 3
STATES_SLACK_S = 3.0
"""No decision depends on the states of jobs: they follow with some delay."""
SCRAPE_EVERY = 8
"""Looks between two scrapes of metrics."""
HISTORY = 400
"""Looks whose gauges are kept: more than the longest period."""


class Servers:
    """The API of each server that answers."""

    def __init__(self, farm):
        self._farm = farm
        self._client = httpx.AsyncClient(timeout=ANSWER_TIMEOUT_S)
        self._key = None

    async def open(self):
        keys, name = ApiKeyStore(self._farm.database), f"scenario-{uuid4().hex}"
        made = await keys.create(name, [GrantSpec(Role.ADMIN)], actor="test")
        self._key = made.plain.text
        return self

    async def close(self):
        await self._client.aclose()

    @property
    def up(self):
        return [server for server in self._farm.servers if server.alive and not server.stopped]

    async def ask(self, server, path, *, method="GET", body=None, exists=False, **query):
        """The body of the answer, or None: no answer, or a refusal. `exists`: that it exists is an answer, too, because
        an earlier call may have succeeded whose answer was lost."""
        url = f"http://127.0.0.1:{server.port}{path}"
        headers = {"Authorization": f"Bearer {self._key}"}
        try:
            response = await self._client.request(method, url, params=query, json=body, headers=headers)
        except httpx.HTTPError:
            return None
        accepted = response.status_code < 300 or (exists and b"already exists" in response.content)
        return response.content if accepted else None

    async def change(self, method, path, *, body=None, tries=20, exists=False, **query):
        """Call any server until one accepts; False: none did."""
        for number in range(tries):
            if up := self.up:
                server, url = up[number % len(up)], f"/api/v1{path}"
                answer = await self.ask(server, url, method=method, body=body, exists=exists, **query)
                if answer is not None:
                    return True
            await asyncio.sleep(0.2)
        return False

    async def explain(self, server, job):
        answer = await self.ask(server, f"/api/v1/jobs/{job}/explain")
        return None if answer is None else msgspec.json.decode(answer, type=JobExplanation)

    async def listed(self, server, state):
        """Ids of all jobs in a state; None if not all of them were listed."""
        answer = await self.ask(server, "/api/v1/jobs", q=f"state:{state}", limit=1000)
        page = None if answer is None else msgspec.json.decode(answer)
        return {item["id"] for item in page["items"]} if page and page.get("next") is None else None

    async def queues(self, server):
        answer = await self.ask(server, "/api/v1/queues")
        if answer is None:
            return None
        return {
            item["queue"]: Counts(*(item[state] for state in QUEUE_STATES))
            for item in msgspec.json.decode(answer)["items"]
        }

    async def metrics(self, server):
        answer = await self.ask(server, "/metrics")
        if answer is None:
            return {}
        lines = [line.rpartition(" ") for line in answer.decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines if name.startswith(tuple(truth.PERIODS_S))}


class Watch:
    def __init__(self, farm, disturbances, seed=0):
        self.farm = farm
        self.disturbances = disturbances
        self.servers = Servers(farm)
        self.violations = []
        self.looks = Counter()
        self.facts = None
        """Those of the last look."""
        self.dispatch = DispatchWatch(disturbances)
        self.claims = ClaimWatch(disturbances)
        self.order = OrderWatch(disturbances)
        self.lasting = Persistent(disturbances)
        self.states = Persistent(disturbances, STATES_SLACK_S)
        self.gauges = Persistent(disturbances)
        """Apart, because they are not scraped at every look."""
        self.expected_dead = set()
        """Names of processes that the test has ended and not started again."""
        self._reader = FactsReader(farm.urls["postgres"])
        self._tables = deque(maxlen=HISTORY)
        self._suspected = []
        self._dead = set()
        self._certain = set()
        """Certain lies that were reported."""
        self._rng = random.Random(seed)
        self._trace = Trace(seed)

    async def __aenter__(self):
        await self.servers.open()
        self._task = asyncio.create_task(self._look_periodically())
        return self

    async def __aexit__(self, *_failure):
        self._task.cancel()
        await asyncio.wait([self._task])
        await self.servers.close()
        self._reader.close()
        if not self._task.cancelled():
            self._task.result()

    def check(self):
        """Raises what has ended the watch, if it has ended."""
        if self._task.done():
            self._task.result()

    async def _look_periodically(self):
        for number in itertools.count():
            began = time.monotonic()
            try:
                await self.look(number)
                self.looks["looks"] += 1
            except AWAY:
                self.looks["postgres away"] += 1
            await asyncio.sleep(max(0.05, began + LOOK_INTERVAL_S - time.monotonic()))

    async def look(self, number=0):
        self._check_processes()
        before = await self._reader.read()
        look = Look(before, before)
        up = self.servers.up
        if up and before.jobs:
            await self._ask(look, up, number)
        scrapes = {}
        if number % SCRAPE_EVERY == 0:
            scrapes = {server.name: await self.servers.metrics(server) for server in up}
        look.after = self.facts = await self._reader.read()
        look.room = self._room(look.after)
        self._tables.append(Gauges.of(look.after))
        self._judge(look, scrapes)

    async def _ask(self, look, up, number):
        state = JOB_STATES[number % len(JOB_STATES)]
        server = self._rng.choice(up)
        if (ids := await self.servers.listed(server, state)) is not None:
            look.listed.append((server.name, state, ids))
        if (counts := await self.servers.queues(server)) is not None:
            look.queues.append((server.name, counts))
        known = look.before.job
        jobs = [job for job in self._suspected if job in known][: EXPLAINED_MAX - 1]
        jobs.append(self._rng.choice(look.before.jobs).id)
        for job in jobs:
            for each in up:
                if (answer := await self.servers.explain(each, job)) is not None:
                    look.explained.append((each.name, answer))

    def _judge(self, look, scrapes):
        known = len(self.violations)
        self._trace.add(look)
        self._compare(look, scrapes)
        self._trace.write(self.violations[known:])

    def _compare(self, look, scrapes):
        found = list(truth.lies(look))
        self.looks["answers"] += len(look.explained) + len(look.listed) + len(look.queues)
        if scrapes:
            shown = {lie.key: str(lie) for lie in truth.gauge_lies(self._tables, scrapes, look.after.at)}
            self._report("truth", self.gauges.update(shown, look.after.at))
        for lie in found:
            if lie.certain and (lie.kind, lie.key) not in self._certain:
                self._certain.add((lie.kind, lie.key))
                self.violations.append(Violation("truth", str(lie)))
        lasting = {(lie.kind, *lie.key): str(lie) for lie in found if not lie.certain}
        states = {key: lasting.pop(key) for key in [*lasting] if key[0] == "state"}
        # Explanations are asked for some jobs only: what was not asked again is neither confirmed nor refuted.
        self._suspected = [lie.key[1] for lie in found if lie.kind == "explain" and not lie.certain]
        self._report("truth", self.lasting.update(lasting, look.after.at))
        self._report("truth", self.states.update(states, look.after.at))
        self._report("L1", self.dispatch.update(look.after, look.room))
        self._report("L1", self.claims.update(look.after))
        self._report("O1", self.order.update(look.after))

    def _report(self, invariant, waits):
        for wait in waits:
            lately = self.disturbances.lately(self.facts.at)
            sentence = f"{wait.sentence} ({wait.seconds:.1f} s, at most {wait.limit_s:.0f} s) [{lately}]"
            self.violations.append(Violation(invariant, sentence))

    def _check_processes(self):
        actors = (*self.farm.servers, *self.farm.workers)
        for sentence in ended_processes(actors, self.expected_dead):
            if sentence not in self._dead:
                self._dead.add(sentence)
                self.violations.append(Violation("L2", sentence))

    def _room(self, facts):
        """Free slots of each worker session that can be used: alive, connected, registered for a while."""
        actors = {actor.name: actor for actor in self.farm.workers}
        taken = Counter(proc.host for proc in facts.procs)
        room = {}
        for worker in facts.workers:
            actor = actors.get(worker.name)
            usable = actor is not None and actor.alive and not actor.stopped and worker.up >= actor.started_at
            if usable and facts.now - worker.up > READY_AFTER_S:
                room[worker.host] = max(0, actor.slots - taken[worker.host])
        return room

    def report(self):
        """How long work waited, and how much was compared."""
        lines = [f"{dict(self.looks)}"]
        for name, waits in (
            ("L1", self.dispatch.waits),
            ("L1 of claims", self.claims.waits),
            ("truth", self.lasting),
            ("states", self.states),
            ("gauges", self.gauges),
        ):
            for limit_s, wait in sorted(waits.longest.items()):
                lines.append(f"{name}: longest {wait.seconds:.2f} s of {limit_s} s: {wait.sentence}")
        return "\n".join(lines)
