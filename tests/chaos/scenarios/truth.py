"""What servers say, compared with the tables: lists, explanations, gauges and the tables among themselves. No I/O.

A `Look` holds the facts before and after the answers. Two kinds of lies:

- a *certain* lie contradicts facts that did not change between the two reads, or two tables of one snapshot;
- a *lasting* lie may be a matter of moments (Redis and gauges follow PostgreSQL), so it counts only if every look says
  the same for longer than the time allowed (`watch.Persistent`).

| kind | check |
|---|---|
| counts | counters of the queue equal its rows; open frames of jobs equal the frames in the queue; bookings fit both |
| state | a job on no worker is not DISPATCHED or RUNNING, one with bookings is; reasons are codes of the taxonomy |
| list | a list filtered by state has exactly the jobs in that state |
| explain | state and frame counts are those of the tables; each reason holds; "nothing blocks it" precedes a start |
| gauge | a gauge shows a value that the tables had within its period, and only the leader exports it |
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

from rota.model.reasons import Reason
from tests.chaos.scenarios.facts import NOT_QUEUED, ON_WORKER, Counts, Facts

REASONS = frozenset(reason.value for reason in Reason)
LEVELS = {
    Reason.QUOTA_SUBSCRIPTION: "share",
    Reason.QUOTA_FOLDER: "folder",
    Reason.QUOTA_POINT: "dept",
    Reason.QUOTA_JOB: "job",
    Reason.QUOTA_LAYER: "layer",
}
NEVER = frozenset(
    {
        Reason.NO_POOL_MAPPING,
        Reason.UNKNOWN_TASK,
        Reason.POLICY_UNAVAILABLE,
        Reason.POLICY_THROTTLED,
        Reason.BUS_UNAVAILABLE,
        Reason.BOOKS_UNAVAILABLE,
    }
)
"""Not true in any scenario, except during an outage, when nothing is compared."""
QUEUE_STATES = ("waiting", "running", "deferred")
JOB_STATES = ("PENDING", "SCHEDULED", "DISPATCHED", "RUNNING")


@dataclass(frozen=True)
class Lie:
    kind: str
    key: tuple
    """Identifies it over several looks."""
    sentence: str
    certain: bool = False

    def __str__(self):
        return f"{self.kind}: {self.sentence}"


@dataclass
class Look:
    before: Facts
    after: Facts
    room: dict[str, int] = field(default_factory=dict)
    """Free slots by worker session, of workers that the test did not disturb."""
    listed: list[tuple[str, str, set[str]]] = field(default_factory=list)
    """Server, state and job ids of each complete list."""
    explained: list[tuple[str, object]] = field(default_factory=list)
    """Server and `JobExplanation`."""
    queues: list[tuple[str, dict[str, Counts]]] = field(default_factory=list)
    """Server and its counts by queue."""


def lies(look):
    yield from count_lies(look.after)
    yield from state_lies(look.after)
    yield from list_lies(look)
    yield from queue_lies(look)
    for server, answer in look.explained:
        yield from explain_lies(look, server, answer)


def count_lies(facts):
    for queue in sorted({*facts.scanned, *facts.counted}):
        rows, counted = facts.scanned.get(queue, Counts()), facts.counted.get(queue, Counts())
        if rows != counted:
            yield Lie("counts", ("counter", queue), f"the queue {queue} counts {counted}, its rows are {rows}", True)
    open_frames, booked = Counter(), Counter()
    for layer in facts.layers:
        # The frames of a job that is being ended are closed at once; they stay booked until their workers stop them.
        ending = facts.job[layer.job].ends_as is not None
        booked[layer.queue] += 0 if ending else facts.booked[layer.id]
        if facts.job[layer.job].state not in NOT_QUEUED:
            open_frames[layer.queue] += layer.frames - layer.ended
        elif facts.booked[layer.id]:
            yield Lie("counts", ("early", layer.id), f"layer {layer.id} has bookings before it was admitted", True)
        if facts.booked[layer.id] > layer.frames - layer.ended and not ending:
            yield Lie("counts", ("layer", layer.id), f"{layer} has {facts.booked[layer.id]} bookings", True)
    for queue in sorted({*open_frames, *facts.scanned}):
        rows = facts.scanned.get(queue, Counts())
        if rows.total != open_frames[queue]:
            sentence = f"jobs have {open_frames[queue]} open frames in the queue {queue}, which has {rows}"
            yield Lie("counts", ("open", queue), sentence, True)
        if rows.running < booked[queue]:
            yield Lie("counts", ("booked", queue), f"{queue} has {booked[queue]} bookings, but {rows}", True)


def state_lies(facts):
    for job in facts.jobs:
        tokens = facts.tokens.get(job.id, ())
        if job.state == "SCHEDULED" and tokens:
            yield Lie("state", (job.id,), f"job {job.name} is SCHEDULED with {len(tokens)} frames on workers")
        if job.state in ON_WORKER and not tokens and job.ends_as is None:
            # Frames that ended since the last look were on a worker between the two.
            ended = sum(layer.ended for layer in facts.layers_of.get(job.id, ()))
            yield Lie("state", (job.id, ended), f"job {job.name} is {job.state} with no frame on a worker")
        if job.reason is not None and job.reason not in REASONS:
            yield Lie("state", ("reason", job.id), f"{job.reason!r} of job {job.name} is not a reason code", True)
        if job.reason == Reason.TENANT_LIMIT and not _at_job_limit(facts, job):
            yield Lie("state", ("limit", job.id), f"job {job.name} says tenant_limit, which its show is below")


def list_lies(look):
    for server, state, ids in look.listed:
        for job in look.before.jobs:
            after = look.after.job.get(job.id)
            if after is None or after.version != job.version or (job.id in ids) == (job.state == state):
                continue
            word = "lists" if job.id in ids else "does not list"
            sentence = f"{server} {word} job {job.name} as {state}, but it is {job.state}"
            yield Lie("list", (server, job.id), sentence, True)


def queue_lies(look):
    for server, counts in look.queues:
        for name, rows in look.before.scanned.items():
            if look.after.scanned.get(name) == rows != counts.get(name, rows):
                yield Lie("counts", (server, name), f"{server} says {counts[name]} of {name}, its rows are {rows}")


def _details(facts, job):
    """What a reader of a report needs to find the cause."""
    layers = [f"{layer.ended} of {layer.frames} ended" for layer in facts.layers_of.get(job.id, [])]
    procs = [
        f"token {proc.token} on {proc.host[-4:]} for {facts.now - proc.booked:.1f} s"
        for proc in facts.procs
        if proc.job == job.id
    ]
    return f"{job.id}, {job.state}, ends as {job.ends_as}, {'; '.join(layers)}, {'; '.join(procs)}"


def explain_lies(look, server, answer):
    job = look.before.job.get(str(answer.job))
    after = look.after.job.get(str(answer.job))
    if job is None or after is None or job.version != after.version:
        return
    if answer.state != job.state:
        yield Lie("explain", (server, job.id), f"{server} says {answer.state} of {job.name}: {job.state}", True)
    stable = look.before.claims == look.after.claims and _frames(look.before, job) == _frames(look.after, job)
    waiting, on_workers = look.after.frames_of(job.id)
    if stable and (answer.waiting, answer.on_workers) != (waiting, on_workers):
        said = f"{answer.waiting} waiting and {answer.on_workers} on workers"
        tables = f"{waiting} and {on_workers} ({_details(look.after, job)})"
        sentence = f"{server} says {said} of {job.name}, which has {tables}"
        yield Lie("explain", (server, job.id, "frames"), sentence, True)
    layers = {layer.id: layer for layer in look.after.layers_of.get(job.id, [])}
    claims = [(None, cause) for cause in answer.reasons if cause.layer is None]
    claims += [(layers[str(view.id)], cause) for view in answer.layers for cause in view.reasons]
    for layer, cause in claims:
        if cause.code in LEVELS and layer is not None and _usage_changed(look, cause, job, layer):
            continue
        if not any(Claim(cause, facts, job, layer, look.room).holds for facts in (look.before, look.after)):
            key = (server, job.id, cause.code, layer.id if layer else "")
            tables = f" ({_tables(look.after, cause, job, layer)})" if cause.code in LEVELS and layer else ""
            yield Lie("explain", key, f"{server} says {cause.code} of {job.name}, not so{tables}: {cause.sentence}")
    due = sum(look.after.waiting(layer) for layer in layers.values())
    if stable and not answer.reasons and due and job.queued:
        key = (server, job.id, "nothing", *_frames(look.after, job))
        yield Lie("explain", key, f"{server} says that nothing blocks {job.name}, and it does not start")


def _frames(facts, job):
    layers = facts.layers_of.get(job.id, [])
    return frozenset(facts.tokens.get(job.id, ())), tuple((each.id, each.ended, each.deferred) for each in layers)


@dataclass(frozen=True)
class Claim:
    """A reason that a server gave for a job, or for one of its layers."""

    cause: object
    facts: Facts
    job: object
    layer: object
    room: dict[str, int]

    @property
    def holds(self):
        code = self.cause.code
        if code in LEVELS:
            return self.layer is not None and _limit_refuses(self.cause, self.facts, self.job, self.layer)
        return code not in NEVER and HOLDS.get(code, lambda _: True)(self)

    @property
    def others_wait(self):
        return any(self.facts.waiting(other) or other.deferred for other in self.facts.layers)

    @property
    def other_shows_wait(self):
        jobs, facts = self.facts.job, self.facts
        return any(facts.waiting(other) for other in facts.layers if jobs[other.job].show != self.job.show)


HOLDS = {
    Reason.TENANT_LIMIT: lambda claim: _at_job_limit(claim.facts, claim.job),
    Reason.WAITING_ON_JOB: lambda claim: claim.job.id in claim.facts.dependent,
    Reason.ENDING: lambda claim: claim.job.ends_as is not None,
    Reason.PAUSED: lambda claim: claim.facts.queue[claim.layer.queue].paused,
    Reason.DEFERRED: lambda claim: claim.layer.deferred > 0,
    Reason.NO_SERVER: lambda claim: not claim.facts.leader,
    Reason.NO_WORKERS: lambda claim: not claim.room,
    Reason.POOL_OVERLOADED: lambda claim: sum(claim.room.values()) < claim.facts.waiting(claim.layer),
    Reason.DISPATCH_FAILED: lambda claim: claim.job.failures > 0 and claim.facts.frames_of(claim.job.id)[0] > 0,
    Reason.BEHIND: lambda claim: claim.others_wait,
    Reason.FAIR_SHARE: lambda claim: claim.other_shows_wait,
}
"""Whether a reason is true by the facts; reasons without an entry are not checked."""


def _limit_refuses(cause, facts, job, layer):
    """A limit refuses the next frame, or will once some more have started; its amounts are those of the tables."""
    need = facts.queue[layer.queue].cores
    for key, cap in _limits(cause, facts, job, layer):
        used = facts.used[key]
        amounts = cause.amounts
        exact = amounts is None or (round(amounts.limit * 100), round(amounts.have * 100)) == (cap, used)
        if exact and used + need * max(1, facts.waiting(layer)) > cap:
            return True
    return False


def _tables(facts, cause, job, layer):
    """What the tables say about a limit."""
    limits = [f"{facts.used[key] / 100:g} of {cap / 100:g}" for key, cap in _limits(cause, facts, job, layer)]
    return f"{', '.join(limits) or 'no limit'} in use, {facts.waiting(layer)} wait"


def _usage_changed(look, cause, job, layer):
    """Whether other frames count against the limit than before the answer: it may have been true in between."""
    keys = {key for facts in (look.before, look.after) for key, _ in _limits(cause, facts, job, layer)}
    before, after = (
        {proc.token for proc in facts.procs if not keys.isdisjoint(proc.charged())}
        for facts in (look.before, look.after)
    )
    return before != after


def _limits(cause, facts, job, layer):
    level = LEVELS[cause.code]
    if level != "share":
        keys = {"folder": f"folder {job.folder}", "dept": f"dept {job.show} {job.dept}"}
        key = keys.get(level) or f"{level} {job.id if level == 'job' else layer.id}"
        return [(key, facts.caps[key])] if key in facts.caps else []
    return [
        (f"share {share.show} {share.pool}", share.burst)
        for share in facts.shares
        if share.show == job.show and (cause.refuser is None or cause.refuser.name.endswith(f" in {share.name}"))
    ]


def _at_job_limit(facts, job):
    show = facts.show[job.show]
    return 0 <= show.jobs_max <= show.jobs_used


@dataclass(frozen=True)
class Gauges:
    """Values that a gauge could show: those of the tables at one look."""

    at: float
    values: dict[str, int]

    @classmethod
    def of(cls, facts):
        values = Counter({f'rota_jobs{{state="{state}"}}': 0 for state in JOB_STATES})
        values.update(f'rota_jobs{{state="{job.state}"}}' for job in facts.jobs)
        for state in QUEUE_STATES:
            name = f'rota_queue_frames{{state="{state}"}}'
            values[name] = sum(getattr(counts, state) for counts in facts.scanned.values())
        return cls(facts.at, dict(values))


PERIODS_S = {"rota_jobs": 60.0, "rota_queue_frames": 5.0}


def gauge_lies(history, scrapes, now, margin_s=2.0):
    """`history`: gauges by the tables, oldest first; `scrapes`: metrics by server, all of one moment."""
    exported = Counter()
    for server, metrics in scrapes.items():
        for name in sorted(metrics.keys() & history[-1].values.keys()):
            family = name.partition("{")[0]
            exported[name] += 1
            since = now - PERIODS_S[family] - margin_s
            values = [each.values[name] for each in history if each.at >= since and name in each.values]
            # What lasted for less than the time between two looks is in no history: as much may be missing there.
            step = max((abs(then - value) for value, then in pairwise(values)), default=0)
            if history[0].at <= since and not min(values) - step <= metrics[name] <= max(values) + step:
                sentence = f"{server} shows {name} {metrics[name]:.0f}, the tables had {min(values)} to {max(values)}"
                yield Lie("gauge", (server, name), sentence)
    for name, servers in exported.items():
        if servers > 1:
            yield Lie("gauge", ("leaders", name), f"{servers} servers export {name}")
