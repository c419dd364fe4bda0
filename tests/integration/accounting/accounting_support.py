"""What the tests of the books share: a show as an administrator makes it, calls that stop half way, and what must hold.

`Farm` is a show `duck` with a share of the pool `duck-main`, a folder `shots` and a department `duck-fx`, made and
changed through `Books.change`, so that PostgreSQL and Redis both know it.
"""

import asyncio
from contextlib import asynccontextmanager
from uuid import uuid4

from rota.accounting import allocations
from rota.accounting.audit import audit
from rota.accounting.ledger import BookingGroup, Charge
from rota.accounting.live import reader as live_reader
from rota.accounting.live import reconcile, script_args
from rota.accounting.maintenance import AccountingMaintenance
from rota.accounting.service import AccountingService
from rota.infra.lease import Leases
from rota.model.quota import LEVELS, Usage
from rota.model.settings.accounting import AccountingSettings
from tests.contract.ledger_suite import plain, sql

PLENTY = 10_000
"""Cores; nothing here comes near it."""
TOKENS = sql("SELECT token FROM rota.proc WHERE pk_show = $1 ORDER BY token")
FENCE = sql("SELECT int_fence FROM rota.show WHERE pk_show = $1")
# A1 at this moment: every key whose procs hold more than its cap allows.
_USED = (
    "(SELECT pk_show, {key}, sum(int_cores_reserved) AS cores, sum(int_gpus_reserved) AS gpus"
    " FROM rota.proc GROUP BY 1, 2)"
)
OVER = sql(
    f"SELECT 'subscription' AS level, k.pk_alloc AS id, u.cores, u.gpus FROM rota.subscription k"
    f" JOIN {_USED.format(key='pk_alloc')} AS u USING (pk_show, pk_alloc)"
    " WHERE u.cores > k.int_burst OR k.int_gpu_burst >= 0 AND u.gpus > k.int_gpu_burst"
    + "".join(
        f" UNION ALL SELECT '{table}', k.{key}, u.cores, u.gpus FROM rota.{table} k"
        f" JOIN {_USED.format(key=key)} AS u USING (pk_show, {key})"
        " WHERE k.int_max_cores > 0 AND u.cores > k.int_max_cores OR k.int_max_gpus > 0 AND u.gpus > k.int_max_gpus"
        for table, key in (
            ("folder_resource", "pk_folder"),
            ("job_resource", "pk_job"),
            ("layer_resource", "pk_layer"),
            ("point", "pk_dept"),
        )
    )
)


class Farm:
    def __init__(self, books):
        self.books = books
        self.database = books.database
        self.job, self.layer, self.host = uuid4(), uuid4(), uuid4()

    async def make(self, *, managed=True, burst=PLENTY, name="duck"):
        self.name = name
        self.show = (await self.change("create_show", name, managed=managed)).show.id
        self.pool = (await self.change("create_pool", f"{name}-main")).after.id
        self.dept = (await self.change("create_dept", f"{name}-fx")).after.id
        await self.change("create_subscription", name, f"{name}-main", size=1, burst=burst)
        self.folder = (await self.change("create_folder", name, "shots")).after.id
        await self.change("create_point", name, f"{name}-fx")
        return self

    async def change(self, action, *args, **more):
        return await self.books.change(lambda admin: getattr(admin, action)(*args, actor="ann", **more))

    async def burst(self, cores, gpus=None):
        return await self.change("change_subscription", self.name, f"{self.name}-main", burst=cores, gpu_burst=gpus)

    async def resize(self):
        """A change of limits that changes nothing for anybody."""
        return await self.change("change_subscription", self.name, f"{self.name}-main", size=1)

    async def cap_folder(self, caps):
        return await self.change("change_folder", self.name, "shots", caps)

    async def cap_point(self, caps):
        return await self.change("change_point", self.name, f"{self.name}-fx", caps)

    async def cap_job(self, job=None, **caps):
        return await self.change("change_job", self.name, job or self.job, **caps)

    async def cap_layer(self, layer=None, **caps):
        return await self.change("change_layer", self.name, layer or self.layer, **caps)

    async def flip(self, managed):
        return await self.change("set_managed", self.name, managed)

    @property
    def live(self):
        return self.books.live

    @property
    def keys(self):
        return self.live.keys.show_keys(str(self.show))

    def charge(self, cores=100, gpus=0, **other):
        keys = {"alloc": self.pool, "folder": self.folder, "job": self.job, "layer": self.layer, "dept": self.dept}
        return Charge(**(keys | other), cores=cores, gpus=gpus)

    def group(self, tokens, cores=100, gpus=0, *, capped=True, **other):
        return BookingGroup(self.charge(cores, gpus, **other), self.host, tokens, capped)

    async def book(self, tokens, cores=100, gpus=0, *, force=False, by=None, **other):
        """One group; `by` is another `Books` than ours."""
        group = self.group(tokens, cores, gpus, **other)
        [outcome] = await (by or self.books).book(self.show, [group], force=force)
        return plain(outcome)

    async def release(self, tokens, *, by=None):
        """The tokens that were released."""
        return sorted(token for each in await (by or self.books).release(self.show, tokens) for token in each.tokens)

    async def recount(self, **more):
        return await reconcile.reconcile_show(self.live, self.show, **({"grace_s": 0.0} | more))

    async def audit(self):
        return await audit(self.books, await self.books.admin.show(self.name))

    async def tokens(self):
        return [row["token"] for row in await self.database.rows(TOKENS, self.show)]

    async def fence(self):
        return await self.database.value(FENCE, self.show)

    async def held(self):
        """What procs hold, by key."""
        held = {}
        for each in await allocations.sums(self.database, [self.show]):
            for level, thing in zip(LEVELS, (each.alloc, each.folder, each.job, each.layer, each.dept), strict=True):
                had = held.get((level, thing), Usage())
                held[level, thing] = Usage(had.cores + each.usage.cores, had.gpus + each.usage.gpus)
        return held

    async def counters(self):
        """What Redis counts, by key, without zeros."""
        return {key: usage for key, usage in (await self.live.counters(self.show)).items() if usage != Usage()}

    async def decides_right(self):
        """Whether every hash that has counters has those of the procs: what bookings are decided by."""
        names = await live_reader.names_in_use(self.live.client, self.keys)
        found = await live_reader.read_counters(self.live.client, self.keys, names)
        held = await self.held()
        return all(
            each.usage == held.get(script_args.parse_counter_name(name), Usage())
            for name, each in found.items()
            if each.fields
        )

    async def agrees(self):
        """Whether Redis counts what procs hold, at every key."""
        return await self.counters() == await self.held()

    async def over(self):
        """Keys above their caps: there are none (A1), unless a cap was lowered below use or force was given."""
        return [tuple(row) for row in await self.database.rows(OVER)]

    async def hash(self, key):
        return {name.decode(): value.decode() for name, value in (await self.live.client.hgetall(key)).items()}

    async def count(self, name="sub", field="int_cores"):
        """One counter as text, by the name of its level."""
        things = {"sub": self.pool, "folder": self.folder, "job": self.job, "layer": self.layer, "point": self.dept}
        found = await self.live.client.hget(self.keys.counter_key(f"{name}:{things[name]}"), field)
        return found and found.decode()

    async def seq(self):
        return int(await self.live.client.get(self.keys.seq) or 0)

    def upkeep(self, *, owner=None, grace_s=0.0, **wanted):
        return AccountingMaintenance(
            self.books, Leases(self.database, owner=owner), AccountingSettings(**wanted), grace_s=grace_s, rest=0.0
        )

    def colleague(self, client=None, **more):
        """The books as another process sees them; without a client it has no Redis."""
        return AccountingService(self.database, client, **more)


@asynccontextmanager
async def stopped(monkeypatch, owner, name, work, *, after=False):
    """Runs `work` until it calls `owner.name`, and stops it there, before the call or after it.

        async with stopped(monkeypatch, procs, "insert", farm.book([1])) as booking:
            ...             # what happens meanwhile
        booking.result()    # it went on, and has ended

    Who cancels the task instead sees what is left when a process dies there.
    """
    reached, go = asyncio.Event(), asyncio.Event()
    real = getattr(owner, name)

    async def stop(*args, **more):
        if reached.is_set():
            return await real(*args, **more)
        answer = None
        if after:
            answer = await real(*args, **more)
        reached.set()
        await go.wait()
        return answer if after else await real(*args, **more)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, stop)
        task = asyncio.create_task(work)
        async with asyncio.timeout(10):
            stopping = asyncio.create_task(reached.wait())
            await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            assert reached.is_set(), f"{name} was never called: {task}"
            try:
                yield task
            finally:
                go.set()
                await asyncio.wait({task})


async def die(task):
    """As if the process had died where it stands."""
    task.cancel()
    await asyncio.wait({task})
