"""Helpers of the accounting tests: a show with quota, calls that pause midway, and the invariants.

`ShowQuota` is a show `duck` with a subscription to the pool `duck-main`, a folder `shots` and a department `duck-fx`.
It is created and changed through `AccountingService.change`, so that PostgreSQL and Redis both have it.
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
"""Cores; no test comes near it."""
TOKENS = sql("SELECT token FROM rota.proc WHERE pk_show = $1 ORDER BY token")
FENCE = sql("SELECT int_fence FROM rota.show WHERE pk_show = $1")
# Violations of A1: keys whose procs exceed their cap.
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


class ShowQuota:
    def __init__(self, accounting):
        self.accounting = accounting
        self.database = accounting.database
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
        return await self.accounting.change(lambda admin: getattr(admin, action)(*args, actor="ann", **more))

    async def burst(self, cores, gpus=None):
        return await self.change("change_subscription", self.name, f"{self.name}-main", burst=cores, gpu_burst=gpus)

    async def resize(self):
        """A change of limits without effect."""
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
        return self.accounting.live

    @property
    def keys(self):
        return self.live.keys.show_keys(str(self.show))

    def charge(self, cores=100, gpus=0, **other):
        keys = {"alloc": self.pool, "folder": self.folder, "job": self.job, "layer": self.layer, "dept": self.dept}
        return Charge(**(keys | other), cores=cores, gpus=gpus)

    def group(self, tokens, cores=100, gpus=0, *, capped=True, **other):
        return BookingGroup(self.charge(cores, gpus, **other), self.host, tokens, capped)

    async def book(self, tokens, cores=100, gpus=0, *, force=False, by=None, **other):
        """Book one group; `by` is another `AccountingService` than ours."""
        group = self.group(tokens, cores, gpus, **other)
        [outcome] = await (by or self.accounting).book(self.show, [group], force=force)
        return plain(outcome)

    async def release(self, tokens, *, by=None):
        """Returns the tokens that were released."""
        return sorted(
            token for each in await (by or self.accounting).release(self.show, tokens) for token in each.tokens
        )

    async def reconcile(self, **more):
        return await reconcile.reconcile_show(self.live, self.show, **({"grace_s": 0.0} | more))

    async def audit(self):
        return await audit(self.accounting, await self.accounting.admin.show(self.name))

    async def tokens(self):
        return [row["token"] for row in await self.database.rows(TOKENS, self.show)]

    async def fence(self):
        return await self.database.value(FENCE, self.show)

    async def held(self):
        """Usage of the procs, by key."""
        held = {}
        for each in await allocations.sums(self.database, [self.show]):
            for level, thing in zip(LEVELS, (each.alloc, each.folder, each.job, each.layer, each.dept), strict=True):
                had = held.get((level, thing), Usage())
                held[level, thing] = Usage(had.cores + each.usage.cores, had.gpus + each.usage.gpus)
        return held

    async def counters(self):
        """Non-zero counters in Redis, by key."""
        return {key: usage for key, usage in (await self.live.counters(self.show)).items() if usage != Usage()}

    async def hashes_agree(self):
        """Whether every hash with counters, on which bookings are decided, has the usage of the procs."""
        names = await live_reader.names_in_use(self.live.client, self.keys)
        found = await live_reader.read_counters(self.live.client, self.keys, names)
        held = await self.held()
        return all(
            each.usage == held.get(script_args.parse_counter_name(name), Usage())
            for name, each in found.items()
            if each.fields
        )

    async def agrees(self):
        """Whether Redis counts the usage of the procs at every key."""
        return await self.counters() == await self.held()

    async def over_cap(self):
        """Keys above their caps: none (A1), unless a cap was lowered below use or a booking was forced."""
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

    def maintenance(self, *, owner=None, grace_s=0.0, **settings):
        return AccountingMaintenance(
            self.accounting,
            Leases(self.database, owner=owner),
            AccountingSettings(**settings),
            grace_s=grace_s,
            rest=0.0,
        )

    def other_service(self, client=None, **more):
        """The accounting service of another process; without a client it has no Redis."""
        return AccountingService(self.database, client, **more)


@asynccontextmanager
async def paused_at(monkeypatch, owner, name, work, *, after=False):
    """Run `work` until it calls `owner.name`, and pause it there, before or after the call.

        async with paused_at(monkeypatch, allocations, "insert", quota.book([1])) as booking:
            ...             # what happens meanwhile
        booking.result()    # it has continued and ended

    A task cancelled inside the block leaves the state of a process that crashed there.
    """
    reached, resume = asyncio.Event(), asyncio.Event()
    real = getattr(owner, name)

    async def pause(*args, **more):
        if reached.is_set():
            return await real(*args, **more)
        answer = None
        if after:
            answer = await real(*args, **more)
        reached.set()
        await resume.wait()
        return answer if after else await real(*args, **more)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, pause)
        task = asyncio.create_task(work)
        async with asyncio.timeout(10):
            stopping = asyncio.create_task(reached.wait())
            await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            assert reached.is_set(), f"{name} was never called: {task}"
            try:
                yield task
            finally:
                resume.set()
                await asyncio.wait({task})


async def crash(task):
    """Cancel `task` as if its process had crashed here."""
    task.cancel()
    await asyncio.wait({task})
