"""Performs client actions, which no server does on its own, as a process that tests may kill.

    python -m tests.chaos.pipeline.actions submit KEY | cancel JOB | admit KEY | route TOPIC

DATABASE and NATS are the server URLs. Prints the job or topic when done, and `lost` after a lost reply.
"""

import asyncio
import os
import sys
from uuid import UUID

from rota.engine.admission.transitions import admit
from rota.engine.completion.canceller import JobCanceller
from rota.engine.submission.submitter import Submitter
from rota.infra import failpoints
from rota.infra.nats import Bus, NatsTarget
from rota.infra.postgres import Database, PostgresTarget
from rota.infra.telemetry import logs
from rota.model.job_states import JobState
from rota.model.jobs.submission import LayerSpec, Submission
from rota.placement.route_store import RouteStore
from rota.queue import Queue
from tests.support.jobs import NO_EVENTS, completions


class DeferredGate:
    """An admission gate that defers the decision until after the job is written."""

    at_once = False


async def submit(database, _bus, key, gate=None):
    spec = LayerSpec(task="noop", frames=3)
    submission = Submission(show="film", layers=(spec,), idempotency_key=key)
    (submitted,) = await Submitter(database, NO_EVENTS, gate=gate).submit([submission])
    return submitted.job


async def cancel(database, bus, job):
    canceller = JobCanceller(database, bus, Queue(database), completions(database))
    await canceller.terminate(UUID(str(job)), JobState.CANCELLED, "cancelled")
    return job


async def submit_and_admit(database, bus, key):
    job = await submit(database, bus, key, DeferredGate())
    async with database.transaction() as tx:
        await admit(tx, [job])
    return job


async def route(database, _bus, topic):
    await RouteStore(database).set_topic(topic, ["local"], actor="test")
    return topic


ACTIONS = {"submit": submit, "cancel": cancel, "admit": submit_and_admit, "route": route}


async def main(action, argument):
    database = await Database.open(PostgresTarget(url=os.environ["DATABASE"]))
    bus = await Bus.connect(NatsTarget(url=os.environ["NATS"]))
    try:
        print(await ACTIONS[action](database, bus, argument), flush=True)
    except failpoints.LostReply:
        print("lost", flush=True)
    finally:
        await bus.close()
        await database.close()


if __name__ == "__main__":
    logs.configure("json", "error")
    asyncio.run(main(*sys.argv[1:]))
