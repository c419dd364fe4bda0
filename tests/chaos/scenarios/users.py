"""Performs user actions: submissions through a proxy to PostgreSQL, everything else through the API of any server."""

import asyncio
import itertools
from contextlib import suppress
from uuid import UUID

from rota.model.errors import PostgresUnavailable
from tests.chaos.scenarios.plan import SHOWS, TIGHT_CORES, TIGHT_FOLDER
from tests.support.queue import sql
from tests.support.waiting import until

LIVE_MAX = 40
"""Submissions are left out while so many jobs are live, so that the cluster becomes idle soon after a run."""
FAILED = sql("SELECT pk_job::text FROM rota.job_done WHERE state = 'FAILED' AND workflow_id IS NULL ORDER BY 1")
LIVE_RUNS = sql("SELECT count(*) FROM rota.workflow_run WHERE ts_ended IS NULL")
FINAL = ("SUCCEEDED", "FAILED", "CANCELLED", "TIMEOUT", "DENIED", "OUTPUT_QUARANTINED")
COMPENSATED = {"topic": "default", "task": "noop"}
FIRST = {"id": "a", "task": "noop", "topic": "default", "compensate": COMPENSATED}
WORKFLOWS = {
    "good": [FIRST, {"id": "b", "task": "value", "args": [1], "topic": "default", "depends_on": ["a"]}],
    "doomed": [FIRST, {"id": "b", "task": "fatal", "topic": "default", "depends_on": ["a"]}],
}


class Users:
    def __init__(self, farm, watch):
        self.farm = farm
        self.watch = watch
        self.api = watch.servers
        self.cancelled = set()
        """Jobs that were or may have been ended on purpose."""
        self._numbers = itertools.count(1)

    async def prepare(self):
        folder = {"name": TIGHT_FOLDER, "max_cores": TIGHT_CORES}
        assert await self.api.change("POST", "/shows/film/folders", body=folder, tries=100, exists=True)
        for name, steps in WORKFLOWS.items():
            body = {"name": name, "show": "short", "steps": steps}
            assert await self.api.change("POST", "/workflows", body=body, tries=100, exists=True)

    async def run(self, actions):
        async with asyncio.TaskGroup() as tasks:
            for action in actions:
                await asyncio.sleep(action.after_s)
                tasks.create_task(self._perform(action))

    async def _perform(self, action):
        with suppress(PostgresUnavailable):
            await getattr(self, f"_{action.kind}")(action)

    def _live(self, show):
        """Acknowledged submissions that were live at the last look."""
        facts = self.watch.facts
        known = {} if facts is None else facts.job
        shows = {} if facts is None else {each.id: each.name for each in facts.shows}
        return [
            submit for submit in self.farm.submits
            if submit.jobs and submit.jobs[0] in known and shows.get(known[submit.jobs[0]].show) == show
        ]  # fmt: skip

    def _pick(self, found, action):
        return found[int(action.pick * len(found))] if found else None

    async def _submit(self, action):
        given = dict(action.given)
        if self.watch.facts is not None and len(self.watch.facts.jobs) >= LIVE_MAX:
            return
        follows = given.pop("follows", False)
        if follows and (before := self._pick(self._live(action.show), action)) is not None:
            given |= {"after": (UUID(before.jobs[0]),), "ends": ("SUCCEEDED", "CANCELLED")}
        args = given.pop("args", ())
        await self.farm.submit(given.pop("task"), *args, show=action.show, tries=60, **given)

    async def _cancel(self, action):
        submit = self._pick(self._live(action.show), action)
        if submit is not None:
            submit.ends = (*submit.ends, "CANCELLED")
            self.cancelled.add(submit.jobs[0])
            await self.api.change("POST", f"/jobs/{submit.jobs[0]}/cancel")

    async def _retry(self, action):
        rows = await self.farm.database.rows(FAILED) if self.watch.facts is not None else []
        if row := self._pick(rows, action):
            await self.api.change("POST", f"/jobs/{row['pk_job']}/retry", tries=1)

    async def _burst(self, action):
        await self.api.change("PATCH", f"/shows/{action.show}/subscriptions/local", body=action.given)

    async def _job_cap(self, action):
        submit = self._pick(self._live(action.show), action)
        if submit is not None:
            await self.api.change("PATCH", f"/jobs/{submit.jobs[0]}/caps", body=action.given, tries=3)

    async def _max_jobs(self, action):
        await self.api.change("PATCH", f"/shows/{action.show}", body=action.given)

    async def _folder_cap(self, action):
        await self.api.change("PATCH", f"/shows/film/folders/{TIGHT_FOLDER}", body=action.given)

    async def _pause(self, action):
        facts = self.watch.facts
        if facts is not None and (queue := self._pick(facts.queues, action)) is not None:
            await self.api.change("POST", "/queues/pause", queue=queue.name)

    async def _resume(self, action):
        for queue in self.watch.facts.queues if self.watch.facts is not None else ():
            if queue.paused:
                await self.api.change("POST", "/queues/resume", queue=queue.name)

    async def _workflow(self, action):
        body = {"key": f"run{next(self._numbers)}"}
        await self.api.change("POST", f"/workflows/{action.show}/{action.given['name']}/runs", body=body)

    async def restore(self):
        """Remove everything that may keep work from starting, and wait until no run is live."""
        for show, (burst, _) in SHOWS.items():
            path = f"/shows/{show}/subscriptions/local"
            assert await self.api.change("PATCH", path, body={"burst": burst}, tries=100), f"the burst of {show}"
            assert await self.api.change("PATCH", f"/shows/{show}", body={"max_jobs": -1}, tries=100)
        for queue in await self._queues():
            await self.api.change("POST", "/queues/resume", queue=queue, tries=100)

        async def no_runs():
            return await self.farm.database.value(LIVE_RUNS) == 0

        await until(no_runs, within_s=90, what="the end of all workflow runs")

    async def _queues(self):
        rows = await self.farm.database.rows(sql("SELECT queue FROM rota.queues WHERE paused"))
        return [row["queue"] for row in rows]
