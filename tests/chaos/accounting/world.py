"""A small world for ledger schedules: one show, few keys, tight caps, and processes that use its ledger.

The seed decides what each process does before the run; the schedule decides how they interleave.
"""

import contextlib
from dataclasses import dataclass
from uuid import UUID

import msgspec

from rota.accounting import allocations
from rota.accounting.ledger import NIL_UUID, BookingGroup, Charge, Followers, SingleFrameBatch
from rota.accounting.live import reconcile, seeding
from rota.accounting.maintenance import AccountingMaintenance
from rota.accounting.resources import CapsUpdate
from rota.accounting.service import AccountingService
from rota.infra.lease import Leases
from rota.infra.postgres.sql import parse_query
from rota.infra.redis import RedisKeys
from rota.model.errors import RotaError, Unavailable
from rota.model.quota import RESOURCES
from rota.model.settings.accounting import AccountingSettings
from tests.support.harness.interleavings import Verdict
from tests.support.harness.stepped_database import SteppedDatabase, SteppedRedis
from tests.support.single_frame_batches import with_single_frame_batches

TRIES = 3
END_JOB = parse_query(
    "end_job",
    "-- Test.\nDELETE FROM rota.job_resource"
    " WHERE pk_job = $1 AND (SELECT b_scheduler_managed FROM rota.show_shared($2))",
)
SHOW = "show"
FAR = 1 << 40
"""A token that no process uses."""


@dataclass
class World:
    """Ids of all objects; `script` creates them with their initial caps."""

    show: UUID
    pools: list[UUID]
    folders: list[UUID]
    depts: list[UUID]
    jobs: list[UUID]
    layers: dict[UUID, UUID]
    """Layer -> job."""
    single: dict[UUID, UUID]
    """Layer -> job of jobs that start without caps."""
    managed: bool

    @classmethod
    def make(cls, rng, *, managed=True):
        def some(number):
            return [UUID(int=rng.getrandbits(128), version=4) for _ in range(number)]

        jobs = some(2)
        layers = dict(zip(some(3), [jobs[0], jobs[0], jobs[1]], strict=True))
        single = dict(zip(some(3), some(3), strict=True))
        return cls(some(1)[0], some(2), some(2), some(1), jobs, layers, single, managed)

    def script(self, rng):
        """The statements that create the world."""

        def maybe(*amounts):
            return rng.choice([-1, -1, *amounts])

        yield (
            "INSERT INTO rota.show (pk_show, str_name, b_scheduler_managed) VALUES ('{}', '{}', {})",
            (
                self.show,
                SHOW,
                self.managed,
            ),
        )
        for number, pool in enumerate(self.pools):
            yield "INSERT INTO rota.alloc (pk_alloc, str_name) VALUES ('{}', 'pool{}')", (pool, number)
            yield (
                (
                    "INSERT INTO rota.subscription (pk_subscription, pk_show, pk_alloc, int_burst, int_gpu_burst)"
                    " VALUES (gen_random_uuid(), '{}', '{}', {}, {})"
                ),
                (self.show, pool, rng.choice([250, 300, 400]), maybe(1, 2)),
            )
        for number, dept in enumerate(self.depts):
            yield "INSERT INTO rota.dept (pk_dept, str_name) VALUES ('{}', 'dept{}')", (dept, number)
            yield (
                "INSERT INTO rota.point (pk_show, pk_dept, int_max_cores) VALUES ('{}', '{}', {})",
                (
                    self.show,
                    dept,
                    maybe(350, 500),
                ),
            )
        for number, folder in enumerate(self.folders):
            yield (
                "INSERT INTO rota.folder (pk_folder, pk_show, str_name) VALUES ('{}', '{}', 'folder{}')",
                (
                    folder,
                    self.show,
                    number,
                ),
            )
            yield (
                (
                    "INSERT INTO rota.folder_resource (pk_folder, pk_show, int_max_cores, int_max_gpus)"
                    " VALUES ('{}', '{}', {}, {})"
                ),
                (folder, self.show, maybe(200, 300), maybe(2)),
            )
        odds = rng.choice([0.3, 1.0])
        for job in self.jobs:
            if rng.random() < odds:
                yield (
                    "INSERT INTO rota.job_resource (pk_job, pk_show, int_max_cores) VALUES ('{}', '{}', {})",
                    (
                        job,
                        self.show,
                        maybe(200, 250),
                    ),
                )
        for layer, job in self.layers.items():
            if rng.random() < odds:
                yield (
                    (
                        "INSERT INTO rota.layer_resource (pk_layer, pk_job, pk_show, int_max_cores)"
                        " VALUES ('{}', '{}', '{}', {})"
                    ),
                    (layer, job, self.show, maybe(150, 200)),
                )

    def charge(self, rng):
        layer = rng.choice(list(self.layers))
        return Charge(
            rng.choice([self.pools[0], self.pools[0], self.pools[1]]),
            rng.choice(self.folders),
            self.layers[layer],
            layer,
            rng.choice(self.depts),
            rng.choice([50, 100, 100, 133]),
            rng.choice([0, 0, 1]),
        )

    def single_frame_batch(self, rng, charge, tokens):
        known = self.single if rng.random() < 0.6 else self.single | self.layers
        layers = [rng.choice(list(known)) for _ in tokens]
        like = msgspec.structs.replace(charge, job=NIL_UUID, layer=NIL_UUID)
        return SingleFrameBatch(like, UUID(int=1), tokens, [known[layer] for layer in layers], layers)


EMPTY = (
    "DELETE FROM rota.proc; DELETE FROM rota.proc_grave; DELETE FROM rota.show; DELETE FROM rota.alloc;"
    " DELETE FROM rota.dept;"
)


class Actor:
    """One process with its own memory and clients, and a list of operations."""

    def __init__(self, world, checker, rng, database, client, names, *, without_redis=False):
        self.without_redis = without_redis
        self.world = world
        self.checker = checker
        self.rng = rng
        self._database = database
        self._client = client
        self._names = names

    def bind(self, process):
        self.database = SteppedDatabase(self._database, process)
        client = None if self.without_redis else SteppedRedis(self._client, process, self._names)
        self.accounting = AccountingService(self.database, client, RedisKeys())
        self.maintenance = AccountingMaintenance(
            self.accounting, Leases(self._database), AccountingSettings(), grace_s=0.0, rest=0.0
        )
        return self

    @property
    def live(self):
        return self.accounting.live

    async def do(self, operations):
        for operation, *given in operations:
            with contextlib.suppress(RotaError):
                await getattr(self, operation)(*given)

    async def book(self, groups):
        """Book, retrying with the same tokens after an unknown outcome; may give up early."""
        for _ in range(TRIES):
            batch = self._with_capped_flag(groups)
            try:
                outcomes = await self.accounting.book(self.world.show, batch)
            except Unavailable:
                if self.rng.random() < 0.3:
                    return
            else:
                self.checker.check_outcomes(batch, outcomes)
                return

    def _with_capped_flag(self, groups):
        """Groups with `capped` as the caller read it before; capped jobs and layers are not batched."""
        read = []
        for group in groups:
            each = group.groups() if isinstance(group, SingleFrameBatch) else [group]
            if isinstance(group, SingleFrameBatch) and not any(map(self._is_capped, each)):
                read.append(group)
            else:
                read += [
                    msgspec.structs.replace(single, capped=self._is_capped(single) or self.rng.random() < 0.5)
                    for single in each
                ]
        return read

    def _is_capped(self, group):
        snapshot = self.checker.postgres
        names = (f"job:{group.charge.job}", f"layer:{group.charge.layer}")
        return any(snapshot.cap(name, resource) is not None for name in names for resource in RESOURCES)

    def _some_tokens(self, most=3):
        known_tokens = sorted({*self.checker.postgres.rows, *self.checker.postgres.followers})
        return self.rng.sample(known_tokens, min(len(known_tokens), self.rng.randint(1, most)))

    def _running(self, at):
        """A job or layer with running frames, by its position in a charge."""
        found = sorted({UUID(charge.split(" ")[at]) for charge in self.checker.postgres.rows.values()})
        return self.rng.choice(found) if found else None

    async def release(self):
        await self.accounting.release(self.world.show, self._some_tokens())

    async def release_in_transaction(self):
        async with self.database.transaction() as tx:
            deleted = await allocations.delete(tx, self.world.show, self._some_tokens())
        if self.rng.random() < 0.7:
            deleted = with_single_frame_batches(deleted)
        await self.accounting.publisher.publish(self.world.show, deleted)

    async def bar(self, tokens):
        """As the heir of a dispatcher that is gone."""
        await self.accounting.release_barred(
            sorted(await allocations.tombstone(self.database, self.world.show, tokens))
        )

    async def recount(self, release_orphans=True):
        await reconcile.reconcile_show(self.live, self.world.show, grace_s=0.0, release_orphans=release_orphans)

    async def seed(self):
        await seeding.seed(self.live, self.world.show)

    async def seed_lagging_shows(self):
        await self.maintenance.seed_lagging_shows()

    async def catch_up(self):
        await self.live.sync_limits(self.world.show)

    async def reseed_limits(self):
        await self.maintenance.reseed_limits()

    async def prune_tombstones(self):
        await self.maintenance.prune_tombstones()

    async def rewrite(self):
        await self.accounting.transactional.refresh_managed_tables(self.world.show)

    async def flip(self, managed):
        await self.accounting.change(lambda admin: admin.set_managed(SHOW, managed, actor="test"))

    async def raise_fence(self):
        await self.accounting.raise_fence(self.world.show)

    async def change(self, kind, at, cores, gpus):
        """Change caps, in cores; None keeps a cap."""
        caps = CapsUpdate(max_cores=cores, max_gpus=gpus)

        def work(admin):
            match kind:
                case "sub":
                    return admin.change_subscription(SHOW, f"pool{at}", actor="test", burst=cores, gpu_burst=gpus)
                case "folder":
                    return admin.change_folder(SHOW, f"folder{at}", caps, actor="test")
                case "point":
                    return admin.change_point(SHOW, f"dept{at}", caps, actor="test")
                case "job":
                    job = self._running(2) or self.world.jobs[at]
                    return admin.change_job(SHOW, job, actor="test", max_cores=cores, max_gpus=gpus)
                case "layer":
                    layer = self._running(3) or list(self.world.layers)[at]
                    return admin.change_layer(SHOW, layer, actor="test", max_cores=cores, max_gpus=gpus)

        await self.accounting.change(work)

    async def end_job(self, at):
        """An ended job has no caps, but its tokens may remain for a while."""
        await self.database.run(END_JOB, self.world.jobs[at], self.world.show)

    async def drop_and_make_subscription(self):
        await self.accounting.change(lambda admin: admin.delete_subscription(SHOW, "pool1", actor="test"))
        await self.accounting.change(
            lambda admin: admin.create_subscription(SHOW, "pool1", actor="test", size=0, burst="1.5", gpu_burst=1)
        )


def booking(world, rng, first, least=1):
    """Groups and single-frame batches of a few frames in several buckets."""
    groups = []
    for number in range(rng.randint(1, 2)):
        start = first + number * 8 + 128 * rng.randrange(3)
        tokens = range(start, start + rng.randint(least, 3))
        charge = world.charge(rng)
        is_batch = rng.random() < 0.4
        groups.append(
            world.single_frame_batch(rng, charge, tokens) if is_batch else BookingGroup(charge, UUID(int=1), tokens)
        )
    return groups


def booker(world, rng, number, turns=3):
    """Books its own tokens and releases tokens that it finds."""
    operations = []
    for turn in range(rng.randint(1, turns)):
        operations.append(("book", booking(world, rng, number * 32 + turn % 2 * 16)))
        if rng.random() < 0.5:
            operations.append((rng.choice(["release", "release_in_transaction"]),))
    return operations


def series_booking(world, rng, first):
    """Frames in series, of one layer or of single-frame jobs, and one frame alone."""
    charge, most = world.charge(rng), rng.randint(1, 2)
    starts = [first + 8 * at for at in range(most)]
    carriers = [start + rng.randint(1, 3) for start in starts]
    series = {}
    for start, carrier in zip(starts, carriers, strict=True):
        n = carrier - start
        series[carrier] = Followers(range(start, carrier), [charge.job] * n, [charge.layer] * n)
    alone = first + 16
    if rng.random() < 0.5:
        return [BookingGroup(charge, UUID(int=1), [*carriers, alone], series=series)]
    layers = [rng.choice(list(world.single)) for _ in range(most + 1)]
    like = msgspec.structs.replace(charge, job=NIL_UUID, layer=NIL_UUID)
    jobs = [world.single[layer] for layer in layers]
    return [SingleFrameBatch(like, UUID(int=1), [*carriers, alone], jobs, layers, series=series)]


def series_booker(world, rng, number):
    operations = []
    for turn in range(rng.randint(1, 2)):
        operations.append(("book", series_booking(world, rng, number * 64 + turn % 2 * 32)))
        operations += [(rng.choice(["release", "release_in_transaction"]),)] * rng.randint(1, 2)
    return operations


def changer(world, rng, turns=3):
    operations = []
    for _ in range(rng.randint(1, turns)):
        kind = rng.choice(["sub", "sub", "folder", "point", "job", "job", "layer", "layer"])
        at = rng.randrange({"sub": 2, "folder": 2, "point": 1, "job": 2, "layer": 3}[kind])
        cores = rng.choice(["0.5", "1", "1.33", "2", "3"])
        gpus = rng.choice([None, None, 1, 2])
        operations.append(("change", kind, at, cores, gpus))
    if rng.random() < 0.2:
        operations.append(rng.choice([("drop_and_make_subscription",), ("end_job", rng.randrange(2))]))
    return operations


def maintainer(world, rng):
    kinds = [
        "seed_lagging_shows",
        "seed_lagging_shows",
        "recount",
        "recount",
        "seed",
        "catch_up",
        "reseed_limits",
        "prune_tombstones",
        "raise_fence",
    ]
    return [(rng.choice(kinds),) for _ in range(rng.randint(1, 3))]


def recounter(world, rng):
    return [("recount", rng.random() < 0.7) for _ in range(rng.randint(1, 2))]


def flipper(world, rng):
    between = [("book", booking(world, rng, 128 * rng.randrange(1, 4) - 16))] if rng.random() < 0.7 else []
    return [("flip", not world.managed), *between, ("flip", world.managed)]


def maybe_without_redis(rng, name, odds=0.3):
    return f"redisless {name}" if rng.random() < odds else name


def mixed(world, rng):
    parts = {f"booker{number}": booker(world, rng, number) for number in range(rng.randint(2, 3))}
    if rng.random() < 0.6:
        parts["janitor"] = [("seed_lagging_shows",)] * rng.randint(1, 3)
    for number in range(rng.randint(1, 3)):
        role = rng.choice([recounter, maintainer, maintainer, changer, changer, flipper])
        odds = 0.3 if role in (changer, flipper) else 0
        parts[maybe_without_redis(rng, f"{role.__name__}{number}", odds)] = role(world, rng)
    return parts


def twins(world, rng):
    """Two processes with the same tokens, one that releases them, and one that may raise the fence."""
    book = ("book", booking(world, rng, 0, least=rng.randint(1, 2)))
    parts = {"booker": [book, ("release",)], "twin": [book, ("release",), book], "releaser": [("release",)]}
    raises = [("raise_fence",)] * 4
    parts["tender"] = rng.choice(
        [[("prune_tombstones",)] * 2, raises, raises, changer(world, rng, 1), [("recount", True)]]
    )
    return parts


def caps(world, rng):
    """Caps rise and fall, and not every change reaches Redis."""
    parts = {f"booker{number}": booker(world, rng, number, turns=2) for number in range(2)}
    parts["changer"] = changer(world, rng, 2)
    parts[maybe_without_redis(rng, "other changer", 0.5)] = changer(world, rng, 2)
    return parts


def flips(world, rng):
    """The ledger of the show moves between Redis and PostgreSQL and back."""
    parts = {f"booker{number}": booker(world, rng, number, turns=2) for number in range(2)}
    parts[maybe_without_redis(rng, "flipper", 0.6)] = flipper(world, rng)
    if rng.random() < 0.5:
        parts["janitor"] = [("seed_lagging_shows",)]
    return parts


def floods(world, rng):
    """Redis is lost repeatedly, and several processes seed it."""
    parts = {
        "booker": booker(world, rng, 0, turns=2),
        "janitor": [("seed_lagging_shows",), ("seed_lagging_shows",)],
        "seeder": [("seed",)],
    }
    if rng.random() < 0.5:
        parts["other"] = rng.choice([changer(world, rng, 1), [("seed",)], [("recount", True)]])
    return parts


def recounts(world, rng):
    """Two concurrent reconciliations, while frames are booked and released and jobs get their first caps."""
    parts = {f"booker{number}": booker(world, rng, number, turns=2) for number in range(2)}
    parts |= {"recounter": [("recount", True)], "other recounter": [("recount", False)]}
    if rng.random() < 0.6:
        kind = rng.choice(["job", "layer"])
        parts["changer"] = [("change", kind, rng.randrange(2), "1", None)]
    return parts


def series(world, rng):
    """Frames in series are booked and end in any order, while the ledger is recounted, seeded or moved."""
    parts = {f"booker{number}": series_booker(world, rng, number) for number in range(2)}
    parts["twin"] = [parts["booker0"][0], ("release",)]
    parts |= {f"releaser{number}": [("release_in_transaction",)] * 2 for number in range(2)}
    if rng.random() < 0.4:
        (_, [group]), *_ = parts["booker0"]
        parts["heir"] = [("bar", [rng.choice(list(group.series))])]
    role = rng.choice([recounter, maintainer, flipper, changer])
    parts[role.__name__] = role(world, rng)
    return parts


CASTS = (mixed, mixed, twins, twins, twins, caps, caps, flips, flips, floods, floods, recounts)
FLOOD_FAULTS = (("flush",), ("flush", "flush"), ("flush", "flush"), ("keep", "older"), ("keep", "flush", "older"))
FEW_FAULTS = ((), (), (), ("flush",), ("keep", "older"))


def fault_policy(rng, cast):
    """How often and how a step fails. In `twins`, with shared tokens, releases and inserts often arrive late."""
    rate = rng.choice([0.05, 0.2])
    any_kind = [Verdict.DIES, Verdict.DIES, Verdict.CUT, Verdict.LOST, Verdict.LATE]

    def verdict(rng, what):
        late = cast is twins and what.startswith(("release", "proc_insert"))
        if rng.random() > (0.5 if late else rate):
            return Verdict.GO
        return rng.choice([Verdict.LATE, Verdict.LATE, Verdict.LOST] if late else any_kind)

    return verdict


def plan_redis_faults(rng, cast):
    """Redis faults and the steps before which they occur. None for `twins`: a flush would end their conflict."""
    events = () if cast is twins else rng.choice(FLOOD_FAULTS if cast is floods else FEW_FAULTS)
    return list(zip(sorted(rng.randrange(40) for _ in events), events, strict=True))
