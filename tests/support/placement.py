"""A worker registry with a manual clock, and heartbeats composed by the test."""

import asyncio
from uuid import UUID, uuid5

from rota.model.ids import PoolId
from rota.model.protocol import Heartbeat
from rota.model.settings.lifecycle import RoutingSettings
from rota.placement import Pool, PoolSpec, Routes, WorkerRegistry

SPACE = UUID(int=7)


class ManualClock:
    """A clock that only the test advances."""

    def __init__(self):
        self.now_s = 1000.0

    def now_ms(self):
        return int(self.now_s * 1000)

    def monotonic(self):
        return self.now_s

    async def sleep(self, _seconds):
        await asyncio.sleep(0)


def id_of(name):
    return uuid5(SPACE, name)


def pool(name, **spec):
    return Pool(PoolId(id_of(f"pool {name}")), PoolSpec(name=name, **spec))


def routes(topics, *pools):
    return Routes(topics, {each.name: each for each in pools})


ALL_RULES = RoutingSettings(overload_accounted=True)


class Fleet:
    """A registry; the pool `farm` runs every topic unless routes are given."""

    def __init__(self, given=None, **more):
        self.clock = ManualClock()
        self.registry = WorkerRegistry(self.clock, more.pop("limits", ALL_RULES), seed=1, **more)
        self.registry.set_routes(given or routes({"*": ("farm",)}, pool("farm")))
        self.numbers = {}

    def beat(self, name="w", **fields):
        """The next heartbeat of a worker; non-default fields persist in later heartbeats."""
        number, before = self.numbers.get(name, (0, {}))
        fields = {**before, **fields}
        given = {"pool": "farm", "slots": 10, "cores": 1000, "number": number + 1, **fields}
        fields.pop("number", None)
        self.numbers[name] = (given["number"], fields)
        return self.registry.record_heartbeat(Heartbeat(worker=id_of(name), name=name, **given))

    def place(self, wanted, n=1, **more):
        """Plan, reserve and assign frames; returns their numbers by worker name."""
        plan = self.registry.plan(wanted, n, **more)
        held = self.registry.reserve(plan)
        first = max((0, *(end for _, end in getattr(self, "given", [])))) + 100
        self.given = getattr(self, "given", [])
        for portion in plan.portions:
            self.registry.record_allocations(portion.worker, [(first, portion.n)], plan.need)
            self.given.append((first, first + portion.n))
            first += portion.n
        self.registry.unreserve(held)
        return self.named(plan)

    def named(self, plan):
        found = {}
        for portion in plan.portions:
            name = self.registry.workers[portion.worker].name
            found[name] = found.get(name, 0) + portion.n
        return found

    def worker(self, name="w"):
        return self.registry.workers[id_of(name)]
