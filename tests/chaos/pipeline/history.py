"""The recorded history of a pipeline run, and the checker of its invariants.

A `History` holds submissions, task runs, PostgreSQL commits in commit order, samples taken during the run and the final
state. `violations` checks it. The checker does no I/O, so it can be tested with histories that contain injected faults
(`test_history.py`).

| invariant | check |
|---|---|
| J1 | every acknowledged submission ends once, an unacknowledged one at most once; one idempotency key, one job |
| J2 | job states follow the declared transitions; the final state is the worst end state of its frames |
| J3 | layer counters add up to its frames; an attempt ends once; a frame counted as succeeded was run |
| J4 | no queue entry, proc or live job is left |
| A1 | in commit order, no insert exceeds a cap |
| A2 | in every sample, Redis counts each proc that existed throughout the sample, per token and per key |
| A3 | at the end Redis, procs and usage tables agree and are empty |
| A4 | no booking has a fence older than the last seeding |
| C1 | exact counts equal a scan of the same snapshot, and finally equal the counts of the jobs |
| F1 | the fence of a lease never decreases; a dispatcher declared dead claims nothing |
| P1 | each poison message becomes one dead letter, no other message does, and later messages are consumed |
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
    """One submission under its key. `jobs` are the acknowledged job ids; empty if the outcome is unknown."""

    key: str
    frames: int = 1
    ends: tuple[str, ...] = ("SUCCEEDED",)
    """Allowed final states of the job."""
    jobs: list[str] = field(default_factory=list)


@dataclass
class Run:
    """One run as recorded by the task itself: its start and, if reached, its end."""

    job: str
    layer: str
    frame: int
    attempt: int
    token: int
    worker: str
    began: float
    ended: float | None = None
    raised: bool = False


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
    """An inserted proc: the keys it is charged to, as (level, id), and the fence of its booking."""

    token: int
    show: str
    keys: tuple[tuple[str, str], ...]
    cores: int
    fence: int
    managed: bool = True


@dataclass
class Released:
    token: int


@dataclass
class CapSet:
    """A changed cap; None means unlimited."""

    key: tuple[str, str]
    cores: int | None


@dataclass
class LedgerSeeded:
    """Redis had lost the ledger of a show: later bookings need at least this fence."""

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
class LedgerSample:
    """The ledger of a seeded show in Redis at one moment, and the procs that existed both before and after it."""

    procs: list[Booked]
    tokens: set[int]
    """Tokens of these procs that Redis holds."""
    counters: dict[tuple[str, str], int]
    """Cores by key; Redis keeps no counter for uncapped jobs and layers."""


@dataclass
class Message:
    """Published directly to the bus after `wipes` wipes of JetStream; -1 if it may not have been stored."""

    text: str
    """Idempotency key of a submission, or the text of a poison message."""
    wipes: int
    poison: bool = False


Change = Booked | Released | CapSet | LedgerSeeded | Granted | OwnerDied | Claimed


@dataclass
class History:
    submits: list[Submit] = field(default_factory=list)
    keys: dict[str, str] = field(default_factory=dict)
    """Final idempotency keys and their jobs in PostgreSQL."""
    done: list[Done] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    commits: list[list[Change]] = field(default_factory=list)
    """Changes of each transaction, in commit order."""
    left: dict[str, int] = field(default_factory=dict)
    """Rows left at the end, by kind."""
    audit_problems: list[str] = field(default_factory=list)
    """Ledger audit lines that are inconsistent or not zero."""
    counts: list[tuple[dict, dict]] = field(default_factory=list)
    """Exact and scanned counts by queue, each pair from one snapshot; the last pair is final."""
    ledger_samples: list[LedgerSample] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    wipes: int = 0
    """How often JetStream lost all its data."""
    dead_letters: list[str] = field(default_factory=list)
    """Texts of the dead-lettered messages."""
    pruned: bool = False
    """Whether retention may have dropped counts of ended frames."""


@dataclass(frozen=True)
class Violation:
    invariant: str
    sentence: str

    def __str__(self):
        return f"{self.invariant}: {self.sentence}"


def violations(history):
    """All violations, in the order of the invariants."""
    checks = (_j1, _j2, _j3, _j3_runs, _j4, _a1, _a2, _a3, _a4, _c1, _f1, _p1)
    return [violation for check in checks for violation in check(history)]


def repeated_starts(history):
    """Number of repeated starts of frames: allowed, but worth reporting."""
    started = Counter((run.layer, run.frame) for run in history.runs)
    return sum(n - 1 for n in started.values())


def _j1(history):
    ended = Counter(done.job for done in history.done)
    yield from (Violation("J1", f"job {job} ended {n} times") for job, n in ended.items() if n > 1)
    for submit in history.submits:
        yield from _j1_of(submit, history.keys.get(submit.key), ended)
    known = {submit.key for submit in history.submits}
    owners = {job: key for key, job in history.keys.items()}
    for job in ended:
        if owners.get(job) not in known:
            yield Violation("J1", f"job {job} ended but was never submitted")


def _j1_of(submit, stored, ended):
    answers = set(submit.jobs)
    if len(answers) > 1:
        yield Violation("J1", f"key {submit.key} was acknowledged with {len(answers)} jobs")
    if answers and stored not in answers:
        yield Violation("J1", f"key {submit.key} was acknowledged with a job that PostgreSQL does not have under it")
    for job in answers:
        if job not in ended:
            yield Violation("J1", f"job {job} ({submit.key}) was acknowledged and never ended")
    if not answers and stored is not None and stored not in ended:
        yield Violation("J1", f"job {stored} ({submit.key}) was committed without an acknowledgement and never ended")


def _j2(history):
    by_job = {history.keys.get(submit.key): submit for submit in history.submits}
    for done in history.done:
        states = [JobState(state) for state in done.history]
        if not states or states[0] is not JobState.PENDING:
            yield Violation("J2", f"job {done.job} does not start as PENDING: {done.history}")
        for one, then in pairwise(states):
            if not can_transition(one, then):
                yield Violation("J2", f"job {done.job} went from {one} to {then}")
        if not states or states[-1] != done.state or JobState(done.state) not in TERMINAL_STATES:
            yield Violation("J2", f"job {done.job} is {done.state}, but its history ends with {done.history[-1:]}")
        end_states = [JobState(COUNTED[name]) for layer in done.layers for name, n in layer.counts.items() if n]
        if end_states and worst_state(end_states) != done.state:
            yield Violation("J2", f"job {done.job} is {done.state}, but its frames require {worst_state(end_states)}")
        submit = by_job.get(done.job)
        if submit is not None and done.state not in submit.ends:
            yield Violation(
                "J2", f"job {done.job} ({submit.key}) ended as {done.state}, not as {' or '.join(submit.ends)}"
            )


def _j3(history):
    frames = {history.keys.get(submit.key): submit.frames for submit in history.submits}
    for done in history.done:
        for layer in done.layers:
            if sum(layer.counts.values()) != layer.frames:
                yield Violation("J3", f"layer {layer.id} has {layer.frames} frames but counts {layer.counts}")
        if done.job in frames and sum(layer.frames for layer in done.layers) != frames[done.job]:
            yield Violation(
                "J3", f"job {done.job} was submitted with {frames[done.job]} frames but has a different number"
            )
    attempts = Counter((end.layer, end.frame, end.attempt) for end in history.ends)
    yield from (Violation("J3", f"attempt {what} ended {n} times") for what, n in attempts.items() if n > 1)
    tokens = Counter(end.token for end in history.ends)
    yield from (Violation("J3", f"token {token} ended {n} times") for token, n in tokens.items() if n > 1)
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
            yield Violation("J3", f"frame {frame} of layer {layer} ended {len(ends)} times")
        if ends[-1].attempt < last[layer, frame]:
            yield Violation("J3", f"frame {frame} of layer {layer} ended with an attempt older than its last")
        by_layer[layer][ends[-1].state] += 1
    for layer in (layer for done in history.done for layer in done.layers):
        recorded = by_layer[layer.id]
        for name in ("failed", "timed_out"):
            if recorded[COUNTED[name]] != layer.counts.get(name, 0):
                yield Violation(
                    "J3",
                    f"layer {layer.id} counts {layer.counts.get(name, 0)} {name}, but the recorded ends are {recorded}",
                )
        if recorded["SUCCEEDED"] > layer.counts.get("succeeded", 0):
            yield Violation("J3", f"layer {layer.id} has more results than succeeded frames")


def _j3_runs(history):
    started = Counter(run.token for run in history.runs)
    yield from (Violation("J3", f"token {token} was started {n} times") for token, n in started.items() if n > 1)
    ended = defaultdict(set)
    for run in history.runs:
        if run.ended is not None:
            ended[run.layer].add(run.frame)
    for layer in (layer for done in history.done for layer in done.layers):
        if len(ended[layer.id]) < layer.counts.get("succeeded", 0):
            n = layer.counts["succeeded"]
            yield Violation(
                "J3", f"layer {layer.id} counts {n} succeeded frames, but {len(ended[layer.id])} ran to the end"
            )
    by_frame = defaultdict(set)
    for run in history.runs:
        by_frame[run.layer, run.frame].add(run.attempt)
    for end in history.ends:
        if end.state == "RETRIED" and end.code != "worker_lost" and end.attempt not in by_frame[end.layer, end.frame]:
            yield Violation(
                "J3", f"attempt {end.attempt} of frame {end.frame} of layer {end.layer} failed but never ran"
            )


def _j4(history):
    yield from (Violation("J4", f"{n} {what} left behind") for what, n in sorted(history.left.items()) if n)


def _a1(history):
    used, caps, procs = Counter(), {}, {}
    for number, commit in enumerate(history.commits):
        added = set()
        for change in commit:
            match change:
                case CapSet(key, cores):
                    caps[key] = cores
                case Booked(token=token, keys=keys, cores=cores):
                    procs[token] = change
                    added.update(keys)
                    used.update(dict.fromkeys(keys, cores))
                case Released(token) if token in procs:
                    booked = procs.pop(token)
                    used.subtract(dict.fromkeys(booked.keys, booked.cores))
                case Released(token):
                    yield Violation("A1", f"token {token} was released but never booked")
        for key in sorted(added):
            if caps.get(key) is not None and used[key] > caps[key]:
                yield Violation("A1", f"commit {number} takes {key} to {used[key]} of {caps[key]}")


def _a2(history):
    for number, sample in enumerate(history.ledger_samples):
        needed = Counter()
        for proc in sample.procs:
            needed.update(dict.fromkeys(proc.keys, proc.cores))
            if proc.token not in sample.tokens:
                yield Violation("A2", f"sample {number}: Redis does not hold token {proc.token}, which has a row")
        for key, cores in needed.items():
            if sample.counters.get(key, cores) < cores:
                yield Violation(
                    "A2", f"sample {number}: Redis counts {sample.counters[key]} of {key}, procs hold {cores}"
                )


def _a3(history):
    yield from (Violation("A3", line) for line in history.audit_problems)


def _a4(history):
    seeded_at = {}
    for change in (change for commit in history.commits for change in commit):
        match change:
            case LedgerSeeded(show, fence):
                seeded_at[show] = max(fence, seeded_at.get(show, 0))
            case Booked(token=token, show=show, fence=fence, managed=True) if fence < seeded_at.get(show, 0):
                yield Violation(
                    "A4", f"token {token} was booked with fence {fence}, but Redis was seeded at {seeded_at[show]}"
                )


def _c1(history):
    for exact, scanned in history.counts:
        if exact != scanned:
            yield Violation("C1", f"exact counts {exact} differ from the scan {scanned}")
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
    counts = {
        "completed": totals["completed"],
        "failed": totals["failed"] + totals["dead"],
        "cancelled": totals["cancelled"],
    }
    if ended != counts:
        yield Violation("C1", f"the queue counts {counts}, but the jobs {ended}")


def _f1(history):
    fences, dead = {}, set()
    for change in (change for commit in history.commits for change in commit):
        match change:
            case Granted(lease, fence):
                if fence < fences.get(lease, 0):
                    yield Violation("F1", f"the fence of lease {lease} decreased from {fences[lease]} to {fence}")
                fences[lease] = max(fence, fences.get(lease, 0))
            case OwnerDied(owner):
                dead.add(owner)
            case Claimed(owner) if owner in dead:
                yield Violation("F1", f"dispatcher {owner} claimed after it was declared dead")


def _p1(history):
    dead_letters = Counter(history.dead_letters)
    yield from (Violation("P1", f"{text} has {n} dead letters") for text, n in dead_letters.items() if n > 1)
    poison = {message.text for message in history.messages if message.poison}
    yield from (
        Violation("P1", f"{text} has a dead letter but was not poison") for text in dead_letters.keys() - poison
    )
    for message in history.messages:
        if message.wipes != history.wipes:
            continue
        if message.poison and message.text not in dead_letters:
            yield Violation("P1", f"{message.text} was poison but has no dead letter")
        if not message.poison and message.text not in history.keys:
            yield Violation("P1", f"{message.text} was published but never consumed")
