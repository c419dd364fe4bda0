"""What happened in a run of the whole pipeline, and what of it must never have happened.

A `History` holds what was submitted, what workers ran, what PostgreSQL committed in its own order, what samples saw on
the way and what was left in the end. `faults` judges it. It reads nothing and waits for nothing, so that it can be
tested with histories in which something went wrong (`test_pipeline_history`).

| invariant | what is looked at |
|---|---|
| J1 | every acknowledged submit has one end; an unknown one at most one; one key, one job |
| J2 | states of a job follow the declared edges, and the last is the worst end of its frames |
| J3 | counters of a layer add up to its frames; an attempt ends once; what is counted as done was run |
| J4 | nothing is left in the queue, in the procs, among live jobs |
| A1 | in commit order no insert takes a key over its cap |
| A2 | at every look Redis counts what stood in the procs all the while, token by token and key by key |
| A3 | in the end Redis, procs and tables agree, and hold nothing |
| A4 | nothing was booked under a fence that is older than the last seeding |
| C1 | exact counts equal a scan in the same snapshot, and in the end equal what was submitted |
| F1 | fences of a lease only rise; a dispatcher that was declared dead claims nothing |
| P1 | a poison message is in the dead letters once, nothing else is, and what came behind it was taken |
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

from rota.model.job_states import TERMINAL_STATES, JobState, can_transition, worst_state

COUNTED = {
    "succeeded": "SUCCEEDED",
    "quarantined": "OUTPUT_QUARANTINED",
    "failed": "FAILED",
    "timed_out": "TIMEOUT",
    "cancelled": "CANCELLED",
    "denied": "DENIED",
}


@dataclass
class Submit:
    """One submission under its key. `jobs` are the answers that came, none if it is not known what became of it."""

    key: str
    frames: int = 1
    ends: tuple[str, ...] = ("SUCCEEDED",)
    """In which states the job may end."""
    jobs: list[str] = field(default_factory=list)


@dataclass
class Run:
    """What a task itself wrote down: it began, and perhaps came to its end."""

    job: str
    layer: str
    frame: int
    attempt: int
    token: int
    worker: str
    began: float
    ended: float | None = None


@dataclass
class Layer:
    id: str
    frames: int
    counts: dict[str, int]


@dataclass
class Done:
    job: str
    state: str
    history: list[str]
    layers: list[Layer]


@dataclass
class End:
    """A row of `frame_end`."""

    layer: str
    frame: int
    attempt: int
    token: int
    state: str
    code: str | None = None


@dataclass
class Booked:
    """A proc that was inserted: what it is charged to, as (level, id), and the fence it was booked under."""

    token: int
    show: str
    keys: tuple[tuple[str, str], ...]
    cores: int
    fence: int
    managed: bool = True


@dataclass
class Freed:
    token: int


@dataclass
class Capped:
    """A cap that was set: None is no limit."""

    key: tuple[str, str]
    cores: int | None


@dataclass
class Founded:
    """Redis was found without the books of a show: what is booked from now on needs this fence at least."""

    show: str
    fence: int


@dataclass
class Granted:
    lease: str
    fence: int


@dataclass
class OwnerDied:
    owner: int


@dataclass
class Claimed:
    owner: int


@dataclass
class Kept:
    """The books of a seeded show in Redis at one moment, and procs that stood from before it until after it."""

    standing: list[Booked]
    tokens: set[int]
    """Those of them that Redis holds."""
    counters: dict[tuple[str, str], int]
    """Cores by key. Jobs and layers without a cap are not counted."""


@dataclass
class Message:
    """Published to the bus past every face, when JetStream had been wiped so often; -1: perhaps never stored."""

    text: str
    """A submission's key, or what a poison message holds."""
    wipes: int
    poison: bool = False


Change = Booked | Freed | Capped | Founded | Granted | OwnerDied | Claimed


@dataclass
class History:
    submits: list[Submit] = field(default_factory=list)
    keys: dict[str, str] = field(default_factory=dict)
    """Idempotency keys and their jobs, as PostgreSQL has them in the end."""
    done: list[Done] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    commits: list[list[Change]] = field(default_factory=list)
    """Transactions in the order of their commits, each with its changes."""
    left: dict[str, int] = field(default_factory=dict)
    """What is there in the end and should not be, by what it is."""
    books: list[str] = field(default_factory=list)
    """Lines of the audit that are not in order, or not zero."""
    counts: list[tuple[dict, dict]] = field(default_factory=list)
    """Exact counts and scanned ones, by queue, of one snapshot each. The last is from the end."""
    kept: list[Kept] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    wipes: int = 0
    """How often JetStream lost all it had."""
    letters: list[str] = field(default_factory=list)
    """What the dead letters of messages hold."""
    pruned: bool = False
    """Whether counts of ended frames may have been given up by retention."""


@dataclass(frozen=True)
class Fault:
    invariant: str
    sentence: str

    def __str__(self):
        return f"{self.invariant}: {self.sentence}"


def faults(history):
    """All that went wrong, in the order of the invariants."""
    checks = (_j1, _j2, _j3, _j3_runs, _j4, _a1, _a2, _a3, _a4, _c1, _f1, _p1)
    return [fault for check in checks for fault in check(history)]


def doubles(history):
    """Frames that were begun more than once: allowed, and worth a number."""
    begun = Counter((run.layer, run.frame) for run in history.runs)
    return sum(n - 1 for n in begun.values())


def _j1(history):
    ended = Counter(done.job for done in history.done)
    yield from (Fault("J1", f"job {job} ended {n} times") for job, n in ended.items() if n > 1)
    for submit in history.submits:
        yield from _j1_of(submit, history.keys.get(submit.key), ended)
    known = {submit.key for submit in history.submits}
    owners = {job: key for key, job in history.keys.items()}
    for job in ended:
        if owners.get(job) not in known:
            yield Fault("J1", f"job {job} ended and nobody submitted it")


def _j1_of(submit, kept, ended):
    answers = set(submit.jobs)
    if len(answers) > 1:
        yield Fault("J1", f"key {submit.key} was answered with {len(answers)} jobs")
    if answers and kept not in answers:
        yield Fault("J1", f"key {submit.key} was answered with another job than PostgreSQL has")
    for job in answers:
        if job not in ended:
            yield Fault("J1", f"job {job} ({submit.key}) was acknowledged and never ended")
    if not answers and kept is not None and kept not in ended:
        yield Fault("J1", f"job {kept} ({submit.key}) was written without an answer and never ended")


def _j2(history):
    by_job = {history.keys.get(submit.key): submit for submit in history.submits}
    for done in history.done:
        states = [JobState(state) for state in done.history]
        if not states or states[0] is not JobState.PENDING:
            yield Fault("J2", f"job {done.job} does not begin as PENDING: {done.history}")
        for one, then in pairwise(states):
            if not can_transition(one, then):
                yield Fault("J2", f"job {done.job} went from {one} to {then}")
        if not states or states[-1] != done.state or JobState(done.state) not in TERMINAL_STATES:
            yield Fault("J2", f"job {done.job} is {done.state}, its history says {done.history[-1:]}")
        ways = [JobState(COUNTED[name]) for layer in done.layers for name, n in layer.counts.items() if n]
        if ways and worst_state(ways) != done.state:
            yield Fault("J2", f"job {done.job} is {done.state} and its frames make it {worst_state(ways)}")
        submit = by_job.get(done.job)
        if submit is not None and done.state not in submit.ends:
            yield Fault("J2", f"job {done.job} ({submit.key}) ended as {done.state}, not as {' or '.join(submit.ends)}")


def _j3(history):
    frames = {history.keys.get(submit.key): submit.frames for submit in history.submits}
    for done in history.done:
        for layer in done.layers:
            if sum(layer.counts.values()) != layer.frames:
                yield Fault("J3", f"layer {layer.id} has {layer.frames} frames and counts {layer.counts}")
        if done.job in frames and sum(layer.frames for layer in done.layers) != frames[done.job]:
            yield Fault("J3", f"job {done.job} was submitted with {frames[done.job]} frames and has others")
    attempts = Counter((end.layer, end.frame, end.attempt) for end in history.ends)
    yield from (Fault("J3", f"attempt {what} ended {n} times") for what, n in attempts.items() if n > 1)
    tokens = Counter(end.token for end in history.ends)
    yield from (Fault("J3", f"token {token} ended {n} times") for token, n in tokens.items() if n > 1)
    yield from _j3_ends(history)


def _j3_ends(history):
    terminal = defaultdict(list)
    last = defaultdict(int)
    for end in history.ends:
        last[end.layer, end.frame] = max(last[end.layer, end.frame], end.attempt)
        if end.state != "RETRIED":
            terminal[end.layer, end.frame].append(end)
    by_layer = defaultdict(Counter)
    for (layer, frame), ends in terminal.items():
        if len(ends) > 1:
            yield Fault("J3", f"frame {frame} of layer {layer} ended {len(ends)} times")
        if ends[-1].attempt < last[layer, frame]:
            yield Fault("J3", f"frame {frame} of layer {layer} ended with an attempt older than its last")
        by_layer[layer][ends[-1].state] += 1
    for layer in (layer for done in history.done for layer in done.layers):
        told = by_layer[layer.id]
        for name in ("failed", "timed_out"):
            if told[COUNTED[name]] != layer.counts.get(name, 0):
                yield Fault(
                    "J3", f"layer {layer.id} counts {layer.counts.get(name, 0)} {name}, {told} are written down"
                )
        if told["SUCCEEDED"] > layer.counts.get("succeeded", 0):
            yield Fault("J3", f"layer {layer.id} has more results than frames that succeeded")


def _j3_runs(history):
    begun = Counter(run.token for run in history.runs)
    yield from (Fault("J3", f"token {token} was begun {n} times") for token, n in begun.items() if n > 1)
    ended = defaultdict(set)
    for run in history.runs:
        if run.ended is not None:
            ended[run.layer].add(run.frame)
    for layer in (layer for done in history.done for layer in done.layers):
        if len(ended[layer.id]) < layer.counts.get("succeeded", 0):
            n = layer.counts["succeeded"]
            yield Fault("J3", f"layer {layer.id} counts {n} that succeeded, {len(ended[layer.id])} came to their end")
    by_frame = defaultdict(set)
    for run in history.runs:
        by_frame[run.layer, run.frame].add(run.attempt)
    for end in history.ends:
        if end.state == "RETRIED" and end.code != "worker_lost" and end.attempt not in by_frame[end.layer, end.frame]:
            yield Fault("J3", f"attempt {end.attempt} of frame {end.frame} of layer {end.layer} failed and never ran")


def _j4(history):
    yield from (Fault("J4", f"{n} {what} left behind") for what, n in sorted(history.left.items()) if n)


def _a1(history):
    used, caps, procs = Counter(), {}, {}
    for number, commit in enumerate(history.commits):
        added = set()
        for change in commit:
            match change:
                case Capped(key, cores):
                    caps[key] = cores
                case Booked(token=token, keys=keys, cores=cores):
                    procs[token] = change
                    added.update(keys)
                    used.update(dict.fromkeys(keys, cores))
                case Freed(token) if token in procs:
                    booked = procs.pop(token)
                    used.subtract(dict.fromkeys(booked.keys, booked.cores))
                case Freed(token):
                    yield Fault("A1", f"token {token} was released and never booked")
        for key in sorted(added):
            if caps.get(key) is not None and used[key] > caps[key]:
                yield Fault("A1", f"commit {number} takes {key} to {used[key]} of {caps[key]}")


def _a2(history):
    for number, kept in enumerate(history.kept):
        needed = Counter()
        for proc in kept.standing:
            needed.update(dict.fromkeys(proc.keys, proc.cores))
            if proc.token not in kept.tokens:
                yield Fault("A2", f"look {number}: Redis does not hold token {proc.token}, which has its row")
        for key, cores in needed.items():
            if kept.counters.get(key, cores) < cores:
                yield Fault("A2", f"look {number}: Redis counts {kept.counters[key]} of {key}, procs hold {cores}")


def _a3(history):
    yield from (Fault("A3", line) for line in history.books)


def _a4(history):
    founded = {}
    for change in (change for commit in history.commits for change in commit):
        match change:
            case Founded(show, fence):
                founded[show] = max(fence, founded.get(show, 0))
            case Booked(token=token, show=show, fence=fence, managed=True) if fence < founded.get(show, 0):
                yield Fault("A4", f"token {token} was booked under fence {fence}, Redis was seeded at {founded[show]}")


def _c1(history):
    for exact, scanned in history.counts:
        if exact != scanned:
            yield Fault("C1", f"exact counts {exact} are not those of a scan {scanned}")
            break
    if not history.counts or history.pruned:
        return
    totals = Counter()
    for queue in history.counts[-1][0].values():
        totals.update(queue)
    counted = Counter()
    for layer in (layer for done in history.done for layer in done.layers):
        counted.update(layer.counts)
    ended = {
        "completed": counted["succeeded"] + counted["quarantined"],
        "failed": counted["failed"] + counted["timed_out"],
        "cancelled": counted["cancelled"] + counted["denied"],
    }
    told = {
        "completed": totals["completed"],
        "failed": totals["failed"] + totals["dead"],
        "cancelled": totals["cancelled"],
    }
    if ended != told:
        yield Fault("C1", f"the queue counts {told}, the jobs {ended}")


def _f1(history):
    fences, dead = {}, set()
    for change in (change for commit in history.commits for change in commit):
        match change:
            case Granted(lease, fence):
                if fence < fences.get(lease, 0):
                    yield Fault("F1", f"lease {lease} went back from fence {fences[lease]} to {fence}")
                fences[lease] = max(fence, fences.get(lease, 0))
            case OwnerDied(owner):
                dead.add(owner)
            case Claimed(owner) if owner in dead:
                yield Fault("F1", f"dispatcher {owner} claimed after it was declared dead")


def _p1(history):
    letters = Counter(history.letters)
    yield from (Fault("P1", f"{text} is {n} times in the dead letters") for text, n in letters.items() if n > 1)
    poison = {message.text for message in history.messages if message.poison}
    yield from (Fault("P1", f"{text} is in the dead letters and was no poison") for text in letters.keys() - poison)
    for message in history.messages:
        if message.wipes != history.wipes:
            continue
        if message.poison and message.text not in letters:
            yield Fault("P1", f"{message.text} was poison and is not in the dead letters")
        if not message.poison and message.text not in history.keys:
            yield Fault("P1", f"{message.text} was published and never taken")
