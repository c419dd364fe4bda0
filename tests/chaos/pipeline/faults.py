"""Faults injected into a cluster, as a list generated from a seed.

A fault starts, lasts for some time and is repaired; faults of different targets may overlap. In the end everything is
repaired and running, and the test checks that the cluster becomes idle from there.
"""

import asyncio
import random
import shutil
import signal
from dataclasses import dataclass

from tests.support.waiting import until

LINKS = (("server0", "postgres"), ("server0", "redis"), ("server0", "nats"), ("server1", "postgres"))
LINKS += (("server1", "redis"), ("server1", "nats"), ("worker0", "nats"), ("worker1", "nats"), ("test", "postgres"))

LOST = "until declared lost"
"""Unbounded, because the leader must be connected to the bus again before it may declare a worker lost."""


@dataclass(frozen=True)
class InjectedFault:
    kind: str
    target: str
    after_s: float
    """Measured from the start of the previous fault."""
    hold_s: float
    how: str = ""

    def __str__(self):
        return f"+{self.after_s:.1f}s {self.kind} {self.target} {self.how} for {self.hold_s:.1f}s"


def one_of_each(seed):
    """Every kind once, in an order given by the seed: for a short run."""
    rng = random.Random(seed)
    some = [
        InjectedFault("kill", "worker0", 0.5, 0.2),
        InjectedFault("kill", "server0", 0.5, 0.2),
        InjectedFault("pause", "worker1", 0.5, 0.0, LOST),
        InjectedFault("cut", "server1/postgres", 0.5, 1.5, "drop_replies"),
        InjectedFault("cut", "server0/nats", 0.5, 1.5, "cut"),
        InjectedFault("cut", "server1/redis", 0.5, 1.5, "half_open"),
        InjectedFault("flush", "redis", 0.5, 0.0),
        InjectedFault("wipe", "nats", 0.5, 0.5),
        InjectedFault("restart", "postgres", 0.5, 0.2, "SIGQUIT"),
    ]
    rng.shuffle(some)
    return some


def at_random(seed, seconds):
    """Random faults for `seconds`: some pauses outlast leases, and faults overlap."""
    rng = random.Random(seed)
    faults, at = [], 0.0
    while at < seconds:
        each = _random_fault(rng)
        faults.append(each)
        at += each.after_s
    return faults


def _random_fault(rng):
    after_s = rng.uniform(0.5, 6.0)
    match rng.choices(["kill", "pause", "cut", "flush", "wipe", "restart"], [6, 3, 6, 1, 1, 1])[0]:
        case "kill":
            target = rng.choice(["server0", "server1", "worker0", "worker1", "worker2"])
            return InjectedFault("kill", target, after_s, rng.uniform(0.0, 3.0))
        case "pause":
            target = rng.choice(["server0", "server1", "worker0", "worker1", "worker2"])
            return InjectedFault("pause", target, after_s, rng.choice([0.5, 6.0, 13.0]))
        case "cut":
            how = rng.choice(["cut", "half_open", "drop_replies", "reset", "delay"])
            return InjectedFault("cut", "/".join(rng.choice(LINKS)), after_s, rng.uniform(0.2, 6.0), how)
        case "flush":
            return InjectedFault("flush", "redis", after_s, 0.0, rng.choice(["FLUSHALL", "SIGKILL"]))
        case "wipe":
            return InjectedFault("wipe", "nats", after_s, rng.uniform(0.1, 3.0))
    return InjectedFault("restart", "postgres", after_s, rng.uniform(0.0, 1.0), rng.choice(["SIGINT", "SIGQUIT"]))


class FaultInjector:
    """Injects a list of faults into a cluster, at most one at a time per target."""

    def __init__(self, farm):
        self.farm = farm
        self._locks = {}

    async def run(self, faults):
        async with asyncio.TaskGroup() as tasks:
            for each in faults:
                await asyncio.sleep(each.after_s)
                tasks.create_task(self._inject(each))
        for link in self.farm.links.values():
            link.heal()

    async def _inject(self, each):
        async with self._locks.setdefault(each.target, asyncio.Lock()):
            await getattr(self, f"_{each.kind}")(each)

    def _actor(self, name):
        return next(actor for actor in (*self.farm.servers, *self.farm.workers) if actor.name == name)

    async def _kill(self, each):
        actor = self._actor(each.target)
        await actor.kill()
        await asyncio.sleep(each.hold_s)
        await actor.start()

    async def _pause(self, each):
        actor = self._actor(each.target)
        actor.send(signal.SIGSTOP)
        if each.how == LOST:
            await until(lambda: self.farm.is_lost(each.target), within_s=90, what=f"the loss of {each.target}")
        await asyncio.sleep(each.hold_s)
        actor.send(signal.SIGCONT)

    async def _cut(self, each):
        link = self.farm.links[tuple(each.target.split("/"))]
        if each.how == "reset":
            link.reset()
        elif each.how == "delay":
            link.delay_s = 0.2
        else:
            getattr(link, each.how)()
        await asyncio.sleep(each.hold_s)
        link.heal()
        if each.how in ("half_open", "drop_replies"):
            link.reset()  # dropped bytes have corrupted the open connections

    async def _flush(self, each):
        server = self.farm.stack.servers["redis"]
        if each.how == "SIGKILL":
            await _restart(server, signal.SIGKILL, each.hold_s)
        else:
            await self.farm.client.flushall()

    async def _wipe(self, each):
        server = self.farm.stack.servers["nats"]
        server.process.send_signal(signal.SIGKILL)
        await server.process.wait()
        shutil.rmtree(server.dir / "jetstream", ignore_errors=True)
        await asyncio.sleep(each.hold_s)
        self.farm.wipes += 1
        await server.restart()

    async def _restart(self, each):
        server = self.farm.stack.servers["postgres"]
        await _restart(server, signal.Signals[each.how], each.hold_s)
        await until(self.farm._answers, within_s=30, what="PostgreSQL after its restart")


async def _restart(server, number, hold_s):
    server.process.send_signal(number)
    await server.process.wait()
    await asyncio.sleep(hold_s)
    await server.restart()
