"""A process that runs one engine operation; with a failpoint armed it crashes on the way.

    python -m tests.integration.engine.engine_client days MOMENT | caps '' | retry JOB

URL is the database. `days` creates the day partitions from MOMENT on and drops that day.
"""

import asyncio
import os
import sys
from datetime import datetime, timedelta
from uuid import UUID

from rota.engine.recovery.retention import RetentionMaintenance
from rota.engine.resubmission.resubmitter import Resubmitter
from rota.engine.submission.submitter import Submitter
from rota.infra.blob_store import BlobStore
from rota.infra.lease import Leases
from rota.infra.postgres import Database, PostgresTarget
from rota.infra.telemetry import logs
from rota.queue import Queue
from tests.support.jobs import NO_EVENTS


async def days(database, moment):
    today = datetime.fromisoformat(moment)
    maintenance, lease = await _maintenance(database)
    await maintenance.make_days(lease, now=today)
    await maintenance.drop_days(lease, before=today + timedelta(days=1))


async def caps(database, _about):
    maintenance, lease = await _maintenance(database)
    await maintenance.forget_caps(lease)


async def _maintenance(database):
    leases = Leases(database)
    [lease] = (await leases.acquire([f"client:{os.getpid()}"], kind="upkeep", ttl_s=60.0)).granted
    return RetentionMaintenance(database, leases), lease


async def retry(database, job):
    await Resubmitter(database, Queue(database), Submitter(database, NO_EVENTS), BlobStore(database)).retry_job(
        UUID(job)
    )


async def main(what, about):
    database = await Database.open(PostgresTarget(url=os.environ["URL"]))
    await {"days": days, "caps": caps, "retry": retry}[what](database, about)
    await database.close()


if __name__ == "__main__":
    logs.configure()
    asyncio.run(main(*sys.argv[1:]))
