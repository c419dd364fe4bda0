"""Deterministic interleaving of coroutines that simulate processes, one step at a time.

A step is one round trip to a server. A process blocks before each step; the schedule releases one process and waits
until it reaches its next step, ends, or waits for a lock held by another. The order of steps depends only on a random
number generator, so a seed replays a schedule.

A turn may inject a fault (`Verdict`): the process dies, the call is not sent, its reply is lost, or the caller gives up
and the call is executed much later. A pause needs no verdict: the schedule just does not pick the process for long.
"""

import asyncio
import contextlib
from dataclasses import dataclass
from enum import Enum

NETWORK = "the network"
STEPS_MAX = 3000
STEP_S = 20.0
POLL_S = 0.001


class Verdict(Enum):
    GO = ""
    DIES = "dies before it"
    CUT = "not sent"
    LOST = "reply lost"
    LATE = "given up, done later"


class Died(BaseException):
    """Raised in a process where it dies; the product never handles it."""


@dataclass
class Step:
    process: str
    what: str
    store: str = ""
    verdict: Verdict = Verdict.GO
    reply: str = ""

    def __str__(self):
        reply = f" -> {self.reply}" if self.reply else ""
        return f"{self.process}: {self.what}{reply}" + (f" [{self.verdict.value}]" if self.verdict.value else "")


class Process:
    """One coroutine and its turns. The coroutine calls `take` for every call that leaves the process."""

    def __init__(self, schedule, name):
        self.schedule = schedule
        self.name = name
        self.task = None
        self.what = self.store = None
        self.frail = False
        self.dead = False
        self.last_script = None
        self._turn = None

    @property
    def ready(self):
        return self._turn is not None

    @property
    def ended(self):
        return self.task.done()

    async def take(self, store, what, work, away=None):
        """Run `work` at the next turn of this process. `away(sent)` creates the error of a call without reply."""
        step = await self.wait(store, what, frail=away is not None)
        if step.verdict is Verdict.CUT:
            raise away(sent=False)
        if step.verdict is Verdict.LATE:
            self.schedule.leave_behind(store, f"{self.name}'s {what}", work)
            raise away(sent=True)
        found = await work()
        step.reply = self.schedule.describe(what, found)
        if step.verdict is Verdict.LOST:
            raise away(sent=True)
        return found

    async def wait(self, store, what, *, frail):
        """Block before a step until the next turn, which may inject a fault if `frail`."""
        if self.dead:
            raise Died
        self.store, self.what, self.frail = store, what, frail
        self._turn = asyncio.get_running_loop().create_future()
        self.schedule.moved.set()
        try:
            return await self._turn
        finally:
            self._turn = None

    def go(self, verdict):
        step = Step(self.name, self.what, self.store, verdict)
        if verdict is Verdict.DIES:
            self.dead = True
            self._turn.set_exception(Died())
        else:
            self._turn.set_result(step)
        self._turn = None
        return step


class Schedule:
    """`pick` chooses the next process; at most `bad_turns` turns inject a fault, which `bad(rng, what)` selects.

    `blocked` counts the sessions that wait for a lock in PostgreSQL; it is called only while a transaction is open.
    `describe` summarizes the reply to a step.
    """

    def __init__(self, rng, pick, *, bad_turns=0, bad=None, blocked=None, describe=lambda *_: ""):
        self.rng = rng
        self.pick = pick
        self.bad_turns = bad_turns
        self.bad = bad
        self.describe = describe
        self.steps = []
        self.processes = []
        self.moved = asyncio.Event()
        self.open_transactions = 0
        self._blocked = blocked

    def start(self, name, work):
        """Start a process with the coroutine `work(process)`."""
        process = Process(self, name)
        self.processes.append(process)
        process.task = asyncio.create_task(self._live(process, work), name=name)
        return process

    def leave_behind(self, store, what, work):
        """Schedule a call that its caller has given up and that may still arrive."""

        async def arrive(process):
            await process.wait(store, what, frail=False)
            with contextlib.suppress(Exception):
                await work()

        self.start(NETWORK, arrive)

    @contextlib.contextmanager
    def transaction(self):
        self.open_transactions += 1
        try:
            yield
        finally:
            self.open_transactions -= 1

    async def run(self, before=None, after=None):
        """Run all processes step by step; awaits `before(number)` and `after(step, process)` around each step."""
        try:
            await self._settled()
            number = 0
            while ready := [process for process in self.processes if process.ready]:
                assert number < STEPS_MAX, "too many steps"
                if before:
                    await before(number)
                process = self.pick(self.rng, ready)
                step = await self._step(process)
                if after:
                    await after(step, process)
                number += 1
            for process in self.processes:
                assert process.ended, f"{process.name} is deadlocked"
        finally:
            await self._end()

    async def _step(self, process):
        step = process.go(self._verdict(process))
        self.steps.append(step)
        await self._settled()
        for each in self.processes:
            if each.ended and each.task.exception():
                raise each.task.exception()
        return step

    def _verdict(self, process):
        if self.bad_turns == 0 or not process.frail:
            return Verdict.GO
        verdict = self.bad(self.rng, process.what)
        self.bad_turns -= verdict is not Verdict.GO
        return verdict

    async def _settled(self):
        """Wait until every process is before a step, has ended, or waits for a lock."""
        async with asyncio.timeout(STEP_S):
            while moving := self._moving():
                self.moved.clear()
                if not self.open_transactions:
                    await self.moved.wait()
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await self.moved.wait()
                blocked = moving == self._moving() and await self._blocked() >= len(moving)
                if blocked and moving == self._moving():
                    return

    def _moving(self):
        return [process for process in self.processes if not process.ready and not process.ended]

    async def _live(self, process, work):
        try:
            await work(process)
        except Died:
            pass
        finally:
            asyncio.get_running_loop().call_soon(self.moved.set)

    async def _end(self):
        """End all processes, also after a failure."""
        for process in self.processes:
            process.dead = True
            if process.ready:
                process.go(Verdict.DIES)
        await asyncio.gather(*(process.task for process in self.processes), return_exceptions=True)


def walk(rng, ready):
    """Uniformly random; calls that were given up usually arrive late."""
    prompt = [process for process in ready if process.name != NETWORK]
    return rng.choice(prompt if prompt and rng.random() < 0.95 else ready)


class Stretches:
    """Mostly continues the same process, so that all others pause for long."""

    def __init__(self, on=0.85):
        self.on = on
        self.last = None

    def __call__(self, rng, ready):
        if self.last not in ready or rng.random() > self.on:
            self.last = walk(rng, ready)
        return self.last


class Priorities:
    """Strictly by priority; at a few random steps the highest priority is lowered: few switches, at arbitrary points.
    The probability of finding a bug that needs d switches does not fall with the number of processes (probabilistic
    concurrency testing)."""

    def __init__(self, rng, changes, steps=80):
        self.lowered_at = {rng.randrange(1, steps) for _ in range(changes)}
        self.priority = {}
        self.number = 0

    def __call__(self, rng, ready):
        for process in ready:
            self.priority.setdefault(process.name, 1 + rng.random())
        self.number += 1
        if self.number in self.lowered_at:
            first = max(ready, key=lambda process: self.priority[process.name])
            self.priority[first.name] = 1 / (1 + self.number)
        return max(ready, key=lambda process: self.priority[process.name])


def in_turn(rng, ready):
    """The first ready process, so that each process finishes before the next starts."""
    return ready[0]
