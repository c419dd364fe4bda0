"""A process that does with the books of one show everything that can be done; run by the tests as a second process.

    python -m tests.chaos.accounting.maintainer SHOW_NAME POOL FOLDER JOB LAYER DEPT HOST

It visits every named place of the accounting room. A reply that is lost on the way ends it with `lost`, the end of its
work with `done`.
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


async def keep(books, name, charge, host):
    await books.change(lambda admin: admin.set_managed(name, True, actor="keeper"))
    show = (await books.admin.show(name)).id

    def group(tokens):
        return BookingGroup(charge, host, tokens)

    [outcome] = await books.book(show, [group(TOKENS)])
    await books.release(show, list(outcome.all_booked)[:4])
    await books.book(show, [group(TOKENS[:2])])  # buried: refused and given back
    await books.change(lambda admin: admin.change_folder(name, "shots", CapsUpdate(max_cores=50), actor="keeper"))
    await books.live.adopt(
        show, [BookingGroup(charge, host, [5000])], under=(await books.managed_shows())[show]
    )  # has no row
    await reconcile_show(books.live, show, grace_s=0)
    await books.live.sync_limits(show)
    await seed(books.live, show)
    await books.change(lambda admin: admin.set_managed(name, False, actor="keeper"))
    await books.book(show, [group([2000])])
    await books.change(lambda admin: admin.set_managed(name, True, actor="keeper"))
    await books.book(show, [BookingGroup(replace(charge, job=uuid4(), layer=uuid4()), host, [3000], False)])


async def main(name, *ids):
    alloc, folder, job, layer, dept, host = map(UUID, ids)
    database = await Database.open(PostgresTarget(url=os.environ["DATABASE"]))
    client = connect(RedisTarget(url=os.environ["REDIS"]))
    try:
        await keep(AccountingService(database, client), name, Charge(alloc, folder, job, layer, dept, 100), host)
        print("done", flush=True)
    except failpoints.LostReply:
        print("lost", flush=True)
    finally:
        await client.aclose()
        await database.close()


if __name__ == "__main__":
    logs.configure("json", "error")
    asyncio.run(main(*sys.argv[1:]))
