"""Workflows without workers: the test advances runs and ends jobs.

harness = WorkflowHarness(database)
run = await harness.start(StepSpec(id="a", task="noop"))
await harness.end("a")            # ends its job as a worker would
await harness.advance()
"""

from uuid import UUID

import msgspec

from rota.engine.submission.submitter import Submitter
from rota.model.workflows.spec import WorkflowSpec
from rota.queue import Queue
from rota.workflow.advance_transaction import AdvanceTransaction
from rota.workflow.definitions import Definitions
from rota.workflow.executor import RunExecutor
from rota.workflow.notifier import UnpublishedRuns
from rota.workflow.run_commands import RunCommands
from rota.workflow.run_queries import RunQueries
from rota.workflow.sagas import Sagas
from tests.support.jobs import NO_EVENTS
from tests.support.queue import sql

LAYER = sql("SELECT pk_layer, frames FROM rota.layer WHERE pk_job = $1::uuid")
RETURN = sql("""
INSERT INTO rota.frame_end (pk_layer, frame, attempt, token, state, value, code, error)
VALUES ($1::uuid, $2::int, 1, 1, $3::text, $4::bytea, $5::text, $6::text)""")
COUNT = sql("SELECT rota.layers_count(ARRAY[$1::uuid], ARRAY[$2::int], $3::text, 0)")
FINISH = sql("SELECT * FROM rota.jobs_finish(ARRAY[$1::uuid])")
JOBS = sql("""
SELECT str_name FROM rota.job WHERE workflow_id = $1::text
UNION ALL SELECT str_name FROM rota.job_done WHERE workflow_id = $1::text ORDER BY 1""")
TIMERS = sql("SELECT place, attempt, ts_due FROM rota.workflow_timer WHERE pk_run = $1::uuid ORDER BY ts_due")
SHIFT_TIMERS = sql("UPDATE rota.workflow_timer SET ts_due = ts_due - make_interval(secs => $1::float8)")
INBOX_SIZE = sql("SELECT count(*) FROM rota.workflow_news")


async def end_job(database, job, state="SUCCEEDED", value=None, *, code=None, error=None):
    """End a job of one layer with all its frames in one transaction, as the engine does."""
    async with database.transaction() as tx:
        layer = await tx.row(LAYER, job)
        values = value if layer["frames"] > 1 and isinstance(value, list) else [value] * layer["frames"]
        for frame, each in enumerate(values):
            if each is not None or code is not None:
                data = None if each is None else msgspec.msgpack.encode(each)
                await tx.run(RETURN, layer["pk_layer"], frame, state, data, code, error)
        await tx.value(COUNT, layer["pk_layer"], layer["frames"], state)
        assert await tx.rows(FINISH, job), "the job had already ended"


class WorkflowHarness:
    def __init__(self, database, clock=None, notifier=UnpublishedRuns()):  # noqa: B008 - has no state
        self.database = database
        self.submitter = Submitter(database, NO_EVENTS)
        self.sagas = Sagas(database, Queue(database).dead_letters, notifier)
        self.advancer = RunExecutor(
            database, AdvanceTransaction(self.submitter, Definitions(database), self.sagas), notifier, clock
        )
        self.commands = RunCommands(self.advancer, clock)
        self.queries = RunQueries(database)
        self.run: UUID | None = None

    async def declare(self, *steps, name="flow", **more):
        return await self.commands.declare(WorkflowSpec(name=name, show="film", steps=steps, **more), "ann")

    async def start(self, *steps, given=None, name="flow", **more):
        """Start a run of a workflow with these steps."""
        if steps:
            await self.declare(*steps, name=name, **more)
        self.run = (await self.commands.start("film", name, given, actor="ann")).run
        return self.run

    async def job(self, step, run=None):
        """The job of a step."""
        found = await self.queries.get(run or self.run)
        return next(each.job for each in found.steps if each.id == step)

    async def end(self, step, state="SUCCEEDED", value=None, *, run=None, **more):
        await end_job(self.database, await self.job(step, run), state, value, **more)

    async def advance(self):
        """Advance until nothing is left to advance; returns the number of advances."""
        advanced = 0
        while some := await self.advancer.advance_batch() + await self.advancer.advance_sagas():
            advanced += some
        return advanced

    async def states(self, run=None):
        found = await self.queries.get(run or self.run)
        return {"": found.state.value} | {step.id: step.state.value for step in found.steps}

    async def jobs(self, run=None):
        """Names of all jobs that a run has submitted."""
        return [row["str_name"].partition(".")[2] for row in await self.database.rows(JOBS, str(run or self.run))]

    async def timers(self, run=None):
        return [(row["place"], row["attempt"]) for row in await self.database.rows(TIMERS, run or self.run)]

    async def pass_time(self, seconds):
        """Move all timers closer by `seconds`."""
        await self.database.run(SHIFT_TIMERS, float(seconds))

    async def timeline(self, run=None):
        return [(moment.happened.step, moment.happened.what) for moment in await self.queries.timeline(run or self.run)]
