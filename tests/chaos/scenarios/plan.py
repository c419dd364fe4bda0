"""What users do and what fails, as lists that follow from a seed and a duration alone. No I/O."""

import random
from dataclasses import dataclass, field

from tests.chaos.pipeline.faults import LOST, InjectedFault

SHOWS = {"film": (6, 3), "short": (4, 2), "plain": (3, 2)}
"""Burst and size; `plain` is not managed."""
TIGHT_FOLDER, TIGHT_CORES = "tight", 2
SERVERS = ("server0", "server1")
WORKERS = ("worker0", "worker1", "worker2", "worker3")
LOCKED = ("queue_returned", "job", "layer", "proc", "worker", "lease", "subscription", "outbox", "deferred_jobs")
FULL = ("proc", "job", "layer", "job_done", "outbox", "lease", "frame_end", "queue_returned", "worker")
USERS_PAUSE_S = 0.3
CALM_S = 6.0
"""Without faults at the start: the stricter limit of L1 applies."""


@dataclass(frozen=True)
class UserAction:
    after_s: float
    """Measured from the previous action."""
    kind: str
    show: str = ""
    pick: float = 0.0
    """Chooses among what there is when it is done: 0 is the first, just below 1 the last."""
    given: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    seed: int
    users: list[UserAction]
    faults: list[InjectedFault]

    def __str__(self):
        return "\n".join([f"seed {self.seed}", *map(str, self.faults)])


def short_plan(seed):
    """One fault of most kinds, in an order given by the seed."""
    rng = random.Random(f"faults {seed}")
    faults = [
        InjectedFault("kill", rng.choice(SERVERS), 2.0, 0.3),
        InjectedFault("kill", rng.choice(WORKERS), 2.0, 0.5),
        InjectedFault("pause", rng.choice(WORKERS), 2.0, 0.0, LOST),
        InjectedFault("pause", rng.choice(SERVERS), 2.0, 2.0),
        InjectedFault("cut", f"{rng.choice(SERVERS)}/postgres", 2.0, 1.0, "drop_replies"),
        InjectedFault("lock", rng.choice(LOCKED), 2.0, 1.5),
        InjectedFault("disk_full", ",".join(rng.sample(FULL, 3)), 2.0, 1.0),
        InjectedFault("deadlock", "layer", 2.0, 1.5),
    ]
    rng.shuffle(faults)
    first = [InjectedFault("calm", "", 0.0, CALM_S), *faults]
    return Plan(seed, user_actions(seed, sum(each.after_s for each in faults) + CALM_S), first)


def long_plan(seed, seconds):
    rng = random.Random(f"faults {seed}")
    faults, at = [InjectedFault("calm", "", 0.0, CALM_S)], CALM_S
    while at < seconds:
        faults.append(_fault(rng))
        at += faults[-1].after_s
    return Plan(seed, user_actions(seed, seconds), faults)


WEIGHTS = {
    "kill": 6, "pause": 4, "cut": 5, "lock": 4, "deadlock": 2, "disk_full": 3, "slow": 2, "storm": 1, "roll": 1,
    "flush": 1, "wipe": 1, "restart": 1,
}  # fmt: skip


def _fault(rng):
    after_s = rng.uniform(2.0, 9.0)
    kind = rng.choices([*WEIGHTS], [*WEIGHTS.values()])[0]
    made, target, hold_s, *how = FAULTS[kind](rng)
    return InjectedFault(made, target, after_s, hold_s, *how)


def _cut(rng):
    server = rng.choice(SERVERS)
    links = [f"{server}/postgres", f"{server}/redis", f"{server}/nats", f"{rng.choice(WORKERS)}/nats"]
    how = rng.choice(["cut", "half_open", "drop_replies", "reset"])
    return "cut", rng.choice(links), rng.uniform(0.2, 5.0), how


def _disk_full(rng):
    return "disk_full", ",".join(rng.sample(FULL, rng.randint(1, len(FULL)))), rng.uniform(0.5, 5.0)


FAULTS = {
    "kill": lambda rng: ("kill", rng.choice([*SERVERS, *WORKERS]), rng.uniform(0.0, 3.0)),
    "pause": lambda rng: ("pause", rng.choice([*SERVERS, *WORKERS]), rng.choice([0.5, 3.0, 7.0, 13.0])),
    "cut": _cut,
    "slow": lambda rng: ("cut", f"{rng.choice(SERVERS)}/postgres", rng.uniform(1.0, 4.0), "delay"),
    "lock": lambda rng: ("lock", rng.choice(LOCKED), rng.choice([0.5, 2.0, 7.0])),
    "deadlock": lambda rng: ("deadlock", rng.choice(["layer", "job"]), rng.uniform(1.0, 4.0)),
    "disk_full": _disk_full,
    "storm": lambda _: ("storm", "servers", 4),
    "roll": lambda _: ("roll", "everything", 0.0),
    "flush": lambda rng: ("flush", "redis", 0.0, rng.choice(["FLUSHALL", "SIGKILL"])),
    "wipe": lambda rng: ("wipe", "nats", rng.uniform(0.1, 2.0)),
    "restart": lambda rng: ("restart", "postgres", rng.uniform(0.0, 1.0), rng.choice(["SIGINT", "SIGQUIT"])),
}
"""Kind, target, duration and manner of each fault."""


def user_actions(seed, seconds):
    rng = random.Random(f"users {seed}")
    actions, at = [], 0.0
    while at < seconds:
        action = _user_action(rng, rng.uniform(0.1, 2 * USERS_PAUSE_S - 0.1))
        actions.append(action)
        at += action.after_s
    return actions


def _user_action(rng, after_s):
    show = rng.choice(["film", "film", "short", "short", "plain"])
    kinds = ["submit", "cancel", "retry", "burst", "job_cap", "max_jobs", "pause", "resume", "workflow", "folder_cap"]
    match rng.choices(kinds, [60, 5, 4, 6, 4, 3, 2, 6, 5, 3])[0]:
        case "submit":
            return UserAction(after_s, "submit", show, rng.random(), _job(rng, show))
        case "burst":
            return UserAction(after_s, "burst", show, given={"burst": rng.choice([1, 2, 3, 5, 6])})
        case "job_cap":
            return UserAction(after_s, "job_cap", show, rng.random(), {"max_cores": rng.choice([1, 2, 4, -1])})
        case "max_jobs":
            return UserAction(after_s, "max_jobs", show, given={"max_jobs": rng.choice([1, 2, -1, -1])})
        case "workflow":
            return UserAction(after_s, "workflow", "short", given={"name": rng.choice(["good", "doomed"])})
        case "folder_cap":
            return UserAction(after_s, "folder_cap", "film", given={"max_cores": rng.choice([1, 2, 3])})
        case kind:
            return UserAction(after_s, kind, show, rng.random())


def _job(rng, show):
    """Arguments of `Farm.submit`."""
    priority = {"priority": rng.choice([1, 3, 5, 5, 5, 8])}
    match rng.randrange(12):
        case 0:
            return {"task": "boom", "ends": ("FAILED",), **priority}
        case 1:
            return {"task": "flaky", "args": (2,), "layer": {"retries": {"most": 3, "first_s": 0.3}}, **priority}
        case 2:
            return {"task": "value", "args": (rng.randrange(100),), "frames": 3, **priority}
        case 3:
            return {"task": "crunch", "args": (0.1,), "frames": 2, **priority}
        case 4:
            return {"task": "nap", "args": (0.3,), "frames": 5, "max_cores": rng.choice([1, 2]), **priority}
        case 5 | 6:
            naps = {"args": (rng.choice([0.2, 0.5, 3.0]),), "frames": rng.randint(1, 5)}
            return {"task": "nap", **naps, **priority}
        case 7:
            return {"task": "noop", "frames": rng.randint(10, 60), **priority}
        case 8:
            return {"task": "nap", "args": (0.2,), "frames": 3, "follows": True, **priority}
        case 9:
            folder = TIGHT_FOLDER if show == "film" else "default"
            return {"task": "nap", "args": (0.3,), "frames": 4, "folder": folder, **priority}
    return {"task": "noop", **priority}
