"""What befalls a farm, as a list that a seed decides: the same seed, the same list.

A fault begins, holds for a while and is mended; the next may begin before that, if it befalls something else. In the
end everything is mended and runs: whether the farm comes to rest from there is what is tested.
"""

import asyncio
import random
import shutil
import signal
from dataclasses import dataclass

from tests.support.waiting import until

LINKS = (("server0", "postgres"), ("server0", "redis"), ("server0", "nats"), ("server1", "postgres"))
LINKS += (("server1", "redis"), ("server1", "nats"), ("worker0", "nats"), ("worker1", "nats"), ("test", "postgres"))

LOST = "until it is lost"
"""However long that takes: who leads must have heard of the bus again before it may say so."""


@dataclass(frozen=True)
class Befalls:
    kind: str
    whom: str
    after_s: float
    """After the one before it began."""
    hold_s: float
    how: str = ""

    def __str__(self):
        return f"+{self.after_s:.1f}s {self.kind} {self.whom} {self.how} for {self.hold_s:.1f}s"


def one_of_each(seed):
    """Every kind once, in an order of the seed: for a short run."""
    chance = random.Random(seed)
    some = [
        Befalls("kill", "worker0", 0.5, 0.2),
        Befalls("kill", "server0", 0.5, 0.2),
        Befalls("pause", "worker1", 0.5, 0.0, LOST),
        Befalls("cut", "server1/postgres", 0.5, 1.5, "drop_replies"),
        Befalls("cut", "server0/nats", 0.5, 1.5, "cut"),
        Befalls("cut", "server1/redis", 0.5, 1.5, "half_open"),
        Befalls("flush", "redis", 0.5, 0.0),
        Befalls("wipe", "nats", 0.5, 0.5),
        Befalls("restart", "postgres", 0.5, 0.2, "SIGQUIT"),
    ]
    chance.shuffle(some)
    return some


def at_random(seed, seconds):
    """Whatever comes, for so long: the pauses are longer than leases, and faults overlap."""
    chance = random.Random(seed)
    befalls, at = [], 0.0
    while at < seconds:
        each = _next(chance)
        befalls.append(each)
        at += each.after_s
    return befalls


def _next(chance):
    after_s = chance.uniform(0.5, 6.0)
    match chance.choices(["kill", "pause", "cut", "flush", "wipe", "restart"], [6, 3, 6, 1, 1, 1])[0]:
        case "kill":
            whom = chance.choice(["server0", "server1", "worker0", "worker1", "worker2"])
            return Befalls("kill", whom, after_s, chance.uniform(0.0, 3.0))
        case "pause":
            whom = chance.choice(["server0", "server1", "worker0", "worker1", "worker2"])
            return Befalls("pause", whom, after_s, chance.choice([0.5, 6.0, 13.0]))
        case "cut":
            how = chance.choice(["cut", "half_open", "drop_replies", "reset", "delay"])
            return Befalls("cut", "/".join(chance.choice(LINKS)), after_s, chance.uniform(0.2, 6.0), how)
        case "flush":
            return Befalls("flush", "redis", after_s, 0.0, chance.choice(["FLUSHALL", "SIGKILL"]))
        case "wipe":
            return Befalls("wipe", "nats", after_s, chance.uniform(0.1, 3.0))
    return Befalls("restart", "postgres", after_s, chance.uniform(0.0, 1.0), chance.choice(["SIGINT", "SIGQUIT"]))


class Befaller:
    """Lets a list of faults befall a farm. One thing is befallen by one fault at a time; the next waits its turn."""

    def __init__(self, farm):
        self.farm = farm
        self._turns = {}

    async def run(self, befalls):
        async with asyncio.TaskGroup() as tasks:
            for each in befalls:
                await asyncio.sleep(each.after_s)
                tasks.create_task(self._one(each))
        for link in self.farm.links.values():
            link.heal()

    async def _one(self, each):
        async with self._turns.setdefault(each.whom, asyncio.Lock()):
            await getattr(self, f"_{each.kind}")(each)

    def _actor(self, name):
        return next(actor for actor in (*self.farm.servers, *self.farm.workers) if actor.name == name)

    async def _kill(self, each):
        actor = self._actor(each.whom)
        await actor.kill()
        await asyncio.sleep(each.hold_s)
        await actor.start()

    async def _pause(self, each):
        actor = self._actor(each.whom)
        actor.send(signal.SIGSTOP)
        if each.how == LOST:
            await until(lambda: self.farm.is_lost(each.whom), within_s=90, what=f"{each.whom} to be missed")
        await asyncio.sleep(each.hold_s)
        actor.send(signal.SIGCONT)

    async def _cut(self, each):
        link = self.farm.links[tuple(each.whom.split("/"))]
        if each.how == "reset":
            link.reset()
        elif each.how == "delay":
            link.delay_s = 0.2
        else:
            getattr(link, each.how)()
        await asyncio.sleep(each.hold_s)
        link.heal()
        if each.how in ("half_open", "drop_replies"):
            link.reset()  # what was swallowed is missing in the middle of a connection

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
