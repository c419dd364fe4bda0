"""Runs one schedule of the books from its seed: a world, its processes, the weather, then a time to heal."""

import random
from collections import Counter
from uuid import UUID

from rota.accounting.audit import audit
from rota.accounting.ledger import BookingGroup, Charge
from rota.accounting.live import ledger, limits, reconcile, release_publisher, seeding
from rota.accounting.maintenance import AccountingMaintenance
from rota.accounting.service import AccountingService
from rota.infra.lease import Leases
from rota.infra.redis import RedisKeys
from rota.model.quota import Resource
from rota.model.settings.accounting import AccountingSettings
from tests.chaos.accounting.invariants import Broken, Rules, demand
from tests.chaos.accounting.observed import Onlooker
from tests.chaos.accounting.world import CASTS, EMPTY, FAR, SHOW, Actor, World, bad_luck, booking, forecast
from tests.support.harness.interleavings import Priorities, Schedule, Step, Stretches, walk

LOOKS = 4
ANOTHER_RUN = "0" * 40


def scripts():
    return (
        ledger.BOOK,
        limits.WRITE_LIMITS,
        release_publisher.RELEASE,
        reconcile.COUNT,
        reconcile.SETTLE,
        seeding.SEED,
    )


class Weather:
    """What befalls Redis at certain steps: it is emptied, or comes back as it was some time ago, on another run."""

    def __init__(self, client, events):
        self.client = client
        self.events = events
        self.kept = []

    async def blow(self, schedule, rules, number):
        """Whatever comes before this step."""
        for event in [event for at, event in self.events if at == number]:
            schedule.steps.append(Step("weather", event, "redis"))
            await getattr(self, event)()
            await rules.look("redis", wind=True)

    async def keep(self):
        keys = sorted(await self.client.keys("*"))
        self.kept = [(key, await self.client.dump(key)) for key in keys]

    async def flush(self):
        await self.client.flushdb()

    async def older(self):
        await self.client.flushdb()
        for key, held in self.kept:
            await self.client.restore(key, 0, held)
            if key.startswith(b"acct:show:"):
                await self.client.hset(key, "run", ANOTHER_RUN)


class Explorer:
    """Holds what schedules share; `run` is one of them."""

    def __init__(self, database, client, connection):
        self.database = database
        self.client = client
        self.connection = connection
        self.reached = Counter()
        self.names = {}
        self.steps = 0

    async def load(self):
        """The scripts as they are now; a step is told by the digest of its script."""
        for script in scripts():
            await self.client.script_load(script.text)
            self.names[script.sha] = script.name

    async def run(self, seed, *, cast=None, weather=None, pick=None, bad_turns=None):
        """All of it follows from `seed`. Raises `Broken` with the story. `weather`: (step, event), and so on."""
        rng = random.Random(seed)
        world = World.make(rng, managed=rng.random() < 0.9)
        cast = cast or rng.choice(CASTS)
        await self._make(world, rng)
        onlooker = Onlooker(self.connection, self.client, world.show)
        rules = Rules(onlooker, random.Random(seed + 1))
        schedule = Schedule(
            rng,
            pick or self._pick(rng),
            bad_turns=rng.choice([0, 1, 2, 4]) if bad_turns is None else bad_turns,
            bad=bad_luck(rng, cast),
            blocked=onlooker.blocked,
            describe=self._describe,
        )
        await rules.begin()
        self._start(schedule, world, rules, rng, cast)
        events = Weather(self.client, weather if weather is not None else forecast(rng, cast))

        async def before(number):
            await events.blow(schedule, rules, number)

        async def after(step, process):
            await rules.look(step.store)
            words, process.last_script = process.last_script, None
            await rules.repeated(words)

        try:
            await schedule.run(before, after)
            await self._heal(world, rules)
        except Exception as error:
            story = "\n".join(f"  {number:3} {step}" for number, step in enumerate(schedule.steps))
            raise Broken(f"seed {seed} ({cast.__name__}): {error!r}\n{story}") from error
        self.steps += len(schedule.steps)
        return schedule.steps

    async def _make(self, world, rng):
        text = EMPTY + ";".join(text.format(*given) for text, given in world.script(rng))
        await self.connection.execute(text)
        await self.client.flushdb()
        books = self._books()
        if world.managed and rng.random() < 0.9:
            await seeding.seed(books.live, world.show)
        if rng.random() < 0.6:
            await books.book(world.show, booking(world, rng, 112))

    def _books(self):
        return AccountingService(self.database, self.client, RedisKeys())

    def _pick(self, rng):
        return rng.choice([walk, walk, Stretches(), Priorities(rng, rng.randint(2, 4))])

    def _start(self, schedule, world, rules, rng, cast):
        for name, deeds in cast(world, rng).items():
            own = random.Random(rng.random())
            deaf = name.startswith("deaf ")
            actor = Actor(world, rules, own, self.database, self.client, self.names, deaf=deaf)
            schedule.start(name, lambda process, actor=actor, deeds=deeds: actor.bind(process).do(deeds))

    def _describe(self, what, found):
        """What a step was told, and a note that this was met."""
        words = what.split(" ")
        if words[0] in self.names.values():
            told = found[0].decode()
        elif words[0] == "proc_insert":
            told = " ".join(sorted({row["why"] for row in found}))
        else:
            told = ""
        for each in told.split(" "):
            if each:
                self.reached[words[0], each] += 1
        return told

    async def _heal(self, world, rules):
        """Everybody has ended. What the keeper of the books does in its next rounds must mend all of it."""
        books = self._books()
        upkeep = AccountingMaintenance(books, Leases(self.database), AccountingSettings(), grace_s=0.0, rest=0.0)
        for _ in range(LOOKS):
            if await upkeep.all_seeded():
                break
            await upkeep.seed_lagging_shows()
        await rules.look(wind=True)
        await upkeep.reseed_limits()
        if rules.postgres.managed:
            demand(await reconcile.reconcile_show(books.live, world.show, grace_s=0.0), "A3 the recount ended early")
            await books.transactional.refresh_managed_tables(world.show)
        await rules.at_rest()
        if rules.rng.random() < 0.3:
            found = await audit(books, await books.admin.show(SHOW))
            demand(found.ok, "audit", [line for line in found.lines if line.problem], found.seeded)
        await self._room_is_used(books, world, rules)

    async def _room_is_used(self, books, world, rules):
        """What fits is booked: nothing that befell us left the show refused, or room unused."""
        layer = next(iter(world.layers))
        charge = Charge(world.pools[0], world.folders[0], world.layers[layer], layer, world.depts[0], 1)
        names = [
            f"{word}:{thing}"
            for word, thing in zip(
                ("sub", "folder", "job", "layer", "point"),
                (charge.alloc, charge.folder, charge.job, charge.layer, charge.dept),
                strict=True,
            )
        ]
        caps = [(rules.postgres.cap(name, Resource.CORES), rules.postgres.sums[name, Resource.CORES]) for name in names]
        fits = all(cap is None or used + 1 <= cap for cap, used in caps)
        [outcome] = await books.book(world.show, [BookingGroup(charge, UUID(int=1), [FAR])])
        demand(bool(outcome.booked) == fits, "room", outcome, caps)
        await rules.look()
