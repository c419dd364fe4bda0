"""One run of a plan: users and faults on a cluster that is watched all the time, then quiet and the final checks."""

import asyncio

import msgspec

from tests.chaos.pipeline.history import Submit, Violation, violations
from tests.chaos.scenarios.faults import ScenarioFaults
from tests.chaos.scenarios.liveness import Disturbances, stopped_runs
from tests.chaos.scenarios.plan import SHOWS, WORKERS
from tests.chaos.scenarios.users import FINAL, Users
from tests.chaos.scenarios.watch import Watch

APP = "tests/chaos/scenarios/tasks.py:app"
SLOTS = 5
QUIET_S = 120.0


async def prepare(farm):
    for show, (burst, size) in SHOWS.items():
        await farm.show(show, burst=burst, size=size, managed=show != "plain")
    await farm.keep_commits()
    agents = {"ROTA_POSTGRES_URL": farm.urls["postgres"], "ROTA_REDIS_URL": farm.urls["redis"]}
    await farm.start(servers=2, workers=len(WORKERS), slots=SLOTS, worker={"app": APP, **agents})


class Outcome:
    """What a run found."""

    def __init__(self, plan, watch, history, found):
        self.plan = plan
        self.watch = watch
        self.history = history
        self.found = found

    def __str__(self):
        counted = f"{len(self.history.submits)} submits, {len(self.history.runs)} runs, {len(self.plan.faults)} faults"
        return "\n".join([*map(str, self.found[:20]), counted, self.watch.report(), str(self.plan)])


async def run(farm, plan, *, slowdown=lambda: 1.0):
    disturbances = Disturbances(slowdown)
    async with Watch(farm, disturbances, plan.seed) as watch:
        users = Users(farm, watch)
        await users.prepare()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(users.run(plan.users))
            await ScenarioFaults(farm, watch).run(plan.faults)
        await users.restore()
        await farm.quiet(within_s=QUIET_S)
        watch.check()
    history = with_derived_jobs(await farm.history())
    history.pruned = True  # a retry removes its failed frames from the queue, and a job may end before it is queued
    found = [*watch.violations, *violations(history)]
    found += [Violation("L3", line) for line in stopped_runs(history.runs, _ended_on_purpose(history), disturbances)]
    found += [Violation("T2", line) for line in overlapping_agents(farm.runs / "agents", disturbances)]
    return Outcome(plan, watch, history, found)


def with_derived_jobs(history):
    """Jobs of workflows and of retries have no submission of ours: any end is allowed, but only one."""
    known = {submit.key for submit in history.submits}
    owners = {job: key for key, job in history.keys.items()}
    for done in history.done:
        if owners.get(done.job) not in known:
            key = f"derived {done.job}"
            frames = sum(layer.frames for layer in done.layers)
            history.submits.append(Submit(key, frames, FINAL, [done.job]))
            history.keys[key] = done.job
            known.add(key)
            owners[done.job] = key
    return history


def _ended_on_purpose(history):
    return {done.job for done in history.done if done.state in ("CANCELLED", "TIMEOUT")}


def overlapping_agents(folder, disturbances):
    """T2: runs of one agent that overlap, on workers that the test left alone meanwhile."""
    runs, last = {}, {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_bytes().splitlines():
            what, name, run, worker, at = msgspec.json.decode(line)
            runs.setdefault((name, run, worker), {})[what] = at
    whole = sorted((times["began"], times["ended"], *key) for key, times in runs.items() if len(times) == 2)
    for began, ended, name, run, worker in whole:
        if disturbances.of(worker, began):
            continue
        if name in last and began < last[name][0]:
            yield f"run {run} of agent {name} began before {last[name][1]} had ended"
        last[name] = (ended, run)
