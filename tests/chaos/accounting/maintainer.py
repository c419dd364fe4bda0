"""Performs every ledger operation on one show; tests run it as a second process.

    python -m tests.chaos.accounting.maintainer SHOW_NAME POOL FOLDER JOB LAYER DEPT HOST

It reaches every failpoint of the accounting package. It prints `lost` after a lost reply and `done` at the end.
"""

import asyncio
import os
import sys
from uuid import UUID, uuid4

from msgspec.structs import replace

from rota.accounting import AccountingService, BookingGroup, Charge
from rota.accounting.live.reconcile import reconcile_show
from rota.accounting.live.seeding import seed
from rota.accounting.resources import CapsUpdate
from rota.infra import failpoints
from rota.infra.postgres import Database, PostgresTarget
from rota.infra.redis import RedisTarget, connect
from rota.infra.telemetry import logs

TOKENS = range(1000, 1012)


async def run_all_operations(accounting, name, charge, host):
    await accounting.change(lambda admin: admin.set_managed(name, True, actor="keeper"))
    show = (await accounting.admin.show(name)).id

    def group(tokens):
        return BookingGroup(charge, host, tokens)

    [outcome] = await accounting.book(show, [group(TOKENS)])
    await accounting.release(show, list(outcome.all_booked)[:4])
    await accounting.book(show, [group(TOKENS[:2])])  # tombstoned: declined and released
    await accounting.change(lambda admin: admin.change_folder(name, "shots", CapsUpdate(max_cores=50), actor="keeper"))
    await accounting.live.adopt(
        show, [BookingGroup(charge, host, [5000])], under=(await accounting.managed_shows())[show]
    )  # an orphan without a row
    await reconcile_show(accounting.live, show, grace_s=0)
    await accounting.live.sync_limits(show)
    await seed(accounting.live, show)
    await accounting.change(lambda admin: admin.set_managed(name, False, actor="keeper"))
    await accounting.book(show, [group([2000])])
    await accounting.change(lambda admin: admin.set_managed(name, True, actor="keeper"))
    await accounting.book(show, [BookingGroup(replace(charge, job=uuid4(), layer=uuid4()), host, [3000], False)])


async def main(name, *ids):
    alloc, folder, job, layer, dept, host = map(UUID, ids)
    database = await Database.open(PostgresTarget(url=os.environ["DATABASE"]))
    client = connect(RedisTarget(url=os.environ["REDIS"]))
    try:
        await run_all_operations(
            AccountingService(database, client), name, Charge(alloc, folder, job, layer, dept, 100), host
        )
        print("done", flush=True)
    except failpoints.LostReply:
        print("lost", flush=True)
    finally:
        await client.aclose()
        await database.close()


if __name__ == "__main__":
    logs.configure("json", "error")
    asyncio.run(main(*sys.argv[1:]))
