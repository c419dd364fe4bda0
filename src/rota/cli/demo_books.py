"""The demo's stop at the books: quotas fill, refuse, grow, and survive an emptied Redis."""

from __future__ import annotations

import asyncio
from uuid import uuid4

from rota.accounting import Books, Charge, Group, Why
from rota.accounting.audit import audit
from rota.accounting.items import Show
from rota.accounting.live.seeding import seed
from rota.cli.demo_tour import Tour, bars
from rota.infra.redis import RedisTarget, connect
from rota.model.ids import DeptId, FolderId, JobId, LayerId, PoolId
from rota.model.units import Centicores


async def quotas_fill_and_refuse(tour: Tour) -> None:
    tour.console.print("[bold]A show with 12 cores of a pool, and eight bookers that want 40[/]")
    client = connect(RedisTarget(url=tour.stack.url("redis")))
    try:
        books = Books(tour.database, client)
        show, charge = await _a_show_of_12_cores(books)
        held = await _book_what_fits(tour, books, show, charge)
        tour.shown(len(held) == 24, "24 frames of half a core are booked: the burst exactly, by eight bookers at once")
        [late] = await books.book(show.id, [Group(charge, uuid4(), [900])])
        refusal = late.refusal
        assert refusal
        used, limit = refusal.current / 100, refusal.limit / 100
        tour.shown(used == limit == 12, f"the next is refused by the {refusal.table}: {used:g} of {limit:g} cores used")
        await books.change(lambda admin: admin.change_subscription("film", "farm", actor="demo", burst=13))
        [more] = await books.book(show.id, [Group(charge, uuid4(), range(901, 909))])
        tour.shown(len(more.booked) == 2, "the burst is raised to 13, and two more fit at once")
        await _redis_forgets_everything(tour, books, show, charge)
        await books.release(show.id, [*held, *more.booked])
        found = await audit(books, await books.admin.show("film"))
        tour.shown(found.ok, f"all released; {len(found.lines)} keys agree in Redis and PostgreSQL, every one at 0")
    finally:
        await client.aclose()


async def _a_show_of_12_cores(books: Books) -> tuple[Show, Charge]:
    await books.change(lambda admin: admin.create_pool("farm", actor="demo"))
    await books.change(lambda admin: admin.create_dept("fx", actor="demo"))
    await books.change(lambda admin: admin.create_show("film", actor="demo", managed=True))
    await books.change(lambda admin: admin.create_subscription("film", "farm", actor="demo", size=8, burst=12))
    folder = await books.change(lambda admin: admin.create_folder("film", "shots", actor="demo"))
    assert folder.after
    [pool], [dept] = await books.admin.pools(), await books.admin.depts()
    charge = Charge(
        alloc=PoolId(pool.id),
        folder=FolderId(folder.after.id),
        job=JobId(uuid4()),
        layer=LayerId(uuid4()),
        dept=DeptId(dept.id),
        cores=Centicores(50),
    )
    return await books.admin.show("film"), charge


async def _book_what_fits(tour: Tour, books: Books, show: Show, charge: Charge) -> list[int]:
    held: list[int] = []
    with bars(tour.console) as drawn:
        booked = drawn.add_task("booked", total=24)

        async def booker(number: int) -> None:
            for first in range(number * 10, number * 10 + 10, 2):
                [outcome] = await books.book(show.id, [Group(charge, uuid4(), range(first, first + 2))])
                held.extend(outcome.booked)
                drawn.update(booked, completed=len(held))

        async with asyncio.TaskGroup() as bookers:
            for number in range(8):
                bookers.create_task(booker(number))
    return held


async def _redis_forgets_everything(tour: Tour, books: Books, show: Show, charge: Charge) -> None:
    assert books.live
    await books.live.client.flushdb()
    [refused] = await books.book(show.id, [Group(charge, uuid4(), [950])])
    tour.shown(refused.declined == {950: Why.UNSEEDED}, "Redis is emptied: nothing is booked from nothing")
    again = await seed(books.live, show.id)
    assert again
    counters = await books.live.counters(show.id)
    tour.shown(
        all(usage.cores == 1300 for usage in counters.values()),
        f"it is rebuilt from {again.procs} rows in {again.took_s * 1000:.0f} ms, and counts 13 cores again",
    )
