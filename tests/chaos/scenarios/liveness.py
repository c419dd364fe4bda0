"""Liveness and order of work by looks at the tables: L1 and O1; L2 by processes, L3 by the runs of frames. No I/O.

| invariant | check |
|---|---|
| L1 | while work of a show waits that fits its limits and a free worker, a frame of the show is dispatched in time |
| L1 | frames that a server has claimed are booked or given back in time |
| L2 | no process ends that the test did not end |
| L3 | a frame that runs on a worker which the test left alone runs to its end |
| O1 | no frame is booked before one of higher priority in its show that fits and has waited for the time allowed |
"""

from collections import defaultdict
from dataclasses import dataclass

from rota.engine.dispatch.ordering import AGEING_S

CALM_LIMIT_S = 2.0
DEATH_LIMIT_S = 5.0
OUTAGES = frozenset({"cut", "flush", "wipe", "restart", "lock", "deadlock", "disk_full", "slow"})
"""Disturbances of a server that all processes use: nothing is expected before they end."""
DEATHS = frozenset({"kill", "pause", "roll", "storm"})
ORDER_LIMIT_S = 5.0
"""Dispatchers and rounds compete for quota that is released, so the first to book may be of lower priority."""
LEVELS_MARGIN = 0.5
CLAIM_S = 0.05
"""Claims that began so close to each other may have been committed in the other order."""


@dataclass
class Disturbance:
    kind: str
    target: str
    began: float
    ended: float = float("inf")
    """By the monotonic clock."""

    @property
    def outage(self):
        return self.kind in OUTAGES

    def last_death(self, until):
        """When the last of its processes died, up to this time."""
        return min(self.ended, until) if self.kind in ("roll", "storm") else self.began

    def overlaps(self, since, until):
        return self.began <= until and since <= self.ended + DEATH_LIMIT_S


REPORTED_S = 15.0
"""For which a disturbance is named in reports."""
TOLD_S = 6.0
"""Within this time a worker that was declared lost is told, and stops what it began meanwhile."""


class Disturbances:
    """Faults that are or were in effect, and how busy the machine is."""

    def __init__(self, slowdown=lambda: 1.0):
        """`slowdown`: the factor by which time limits grow, because other work shares the machine."""
        self.all = []
        self.slowdown = slowdown

    def begin(self, kind, target, now):
        disturbance = Disturbance(kind, target, now)
        self.all.append(disturbance)
        return disturbance

    def outage(self, since, until):
        """Whether an outage was in effect at some time in between."""
        return any(each.outage and each.began <= until and since <= each.ended for each in self.all)

    def limit_s(self, since, until):
        """How long something may wait: a moment, or the time allowed after the last death."""
        near = [each for each in self.all if each.overlaps(since, until)]
        if not near:
            return CALM_LIMIT_S * self.slowdown()
        last_death = max((each.last_death(until) for each in near if each.kind in DEATHS), default=since)
        return DEATH_LIMIT_S * self.slowdown() + max(0.0, last_death - since)

    def lately(self, now):
        """Those of the last moments, for a report."""
        near = [each for each in self.all if each.ended > now - REPORTED_S]
        return ", ".join(
            f"{each.kind} {each.target} from {each.began - now:.1f} s"
            + (f" to {each.ended - now:.1f} s" if each.ended < now else "")
            for each in near
        )

    def of(self, target, since):
        """Those of this process after `since`; a worker that was declared lost learns of it a moment later."""
        return [
            each
            for each in self.all
            if each.ended + TOLD_S >= since and (target in each.target.split("/") or each.kind == "roll")
        ]


@dataclass(frozen=True)
class Wait:
    """How long something waited, or has been wrong, and the limit."""

    key: object
    seconds: float
    limit_s: float
    sentence: str


class Persistent:
    """Times for which conditions have held in every look, by key. An outage starts them all anew."""

    def __init__(self, disturbances, slack_s=0.0):
        """`slack_s`: added to the limits."""
        self._disturbances = disturbances
        self._slack_s = slack_s
        self._since = {}
        self._last = None
        self.longest = {}
        """By limit on an idle machine: the longest `Wait`."""

    def update(self, found, now):
        """`found`: sentences by key at this look. Yields a `Wait` once for each that exceeds its limit."""
        if self._last is not None and self._disturbances.outage(self._last, now):
            self._since.clear()
        self._last = now
        self._since = {key: since for key, since in self._since.items() if key in found}
        for key, sentence in found.items():
            since, reported = self._since.setdefault(key, (now, False))
            slack_s = self._slack_s * self._disturbances.slowdown()
            wait = Wait(key, now - since, self._disturbances.limit_s(since, now) + slack_s, sentence)
            base_s = round(wait.limit_s / self._disturbances.slowdown())
            if wait.seconds >= self.longest.get(base_s, wait).seconds:
                self.longest[base_s] = wait
            if wait.seconds > wait.limit_s and not reported:
                self._since[key] = since, True
                yield wait


def fitting(facts, room):
    """Waiting work that fits, by show: a sentence about one such layer. `room`: free slots by worker session."""
    found = {}
    pools = defaultdict(int)
    for worker in facts.workers:
        pools[worker.pool] = max(pools[worker.pool], room.get(worker.host, 0))
    for job in facts.jobs:
        if job.state == "PENDING" and job.ends_as is None and job.id not in facts.dependent:
            found["admission", job.show] = f"job {job.name} waits for its admission"
        if not job.queued or not _may_start(facts, job):
            continue
        for layer in facts.layers_of.get(job.id, []):
            queue = facts.queue[layer.queue]
            if queue.paused or not facts.waiting(layer):
                continue
            for share in facts.shares:
                if share.show != job.show or pools[share.pool] * 100 < queue.cores:
                    continue
                if all(facts.room(key, cap) >= queue.cores for key, cap in facts.limits(job, layer, share.pool)):
                    waiting = facts.waiting(layer)
                    found["show", job.show] = (
                        f"{waiting} frames of {job.name} fit and wait in {facts.show[job.show].name}"
                    )
    return found


def _may_start(facts, job):
    show = facts.show[job.show]
    return show.jobs_max < 0 or job.id in facts.slots or show.jobs_used < show.jobs_max


class DispatchWatch:
    """L1: by show, how long fitting work has waited with nothing of the show dispatched."""

    def __init__(self, disturbances):
        self.waits = Persistent(disturbances)

    def update(self, facts, room):
        found = {(*key, self._progress(facts, key[1])): said for key, said in fitting(facts, room).items()}
        return list(self.waits.update(found, facts.at))

    @staticmethod
    def _progress(facts, show):
        """Changes whenever a frame of the show is dispatched."""
        newest = max((proc.token for proc in facts.procs if proc.show == show), default=0)
        ended = sum(layer.ended for layer in facts.layers if facts.job[layer.job].show == show)
        return newest, ended, facts.done.get(show, 0)


class ClaimWatch:
    """L1: how long claimed frames were neither booked nor given back, by claim."""

    def __init__(self, disturbances):
        self.waits = Persistent(disturbances)

    def update(self, facts):
        names = {layer.id: facts.job[layer.job].name for layer in facts.layers}
        found = {
            (each.claim, each.layer): f"{each.frames} frames of {names[each.layer]} are claimed and not booked"
            for each in facts.unbooked
            if each.layer in names
        }
        return list(self.waits.update(found, facts.at))


class OrderWatch:
    """O1: layers that wait although nothing but the show's share can refuse them, and bookings of lower priority.

    Frames that a server has claimed do not count: if it dies, `ClaimWatch` sees to it that they are claimable again in
    time, and from then on no frame of lower priority may be booked before them. That holds for claims between two looks
    as well: servers claim in order, but of two that have claimed at the same time either may be the first to book.
    """

    def __init__(self, disturbances):
        self._disturbances = disturbances
        self._since = {}
        """By layer: since when it waits (PostgreSQL's and our clock), and its progress."""
        self._seen = set()

    def update(self, facts):
        since = {}
        for job in facts.jobs:
            for layer in facts.layers_of.get(job.id, []) if job.queued and _may_start(facts, job) else ():
                progress = (layer.ended, layer.deferred, layer.attempt, frozenset(facts.tokens.get(job.id, ())))
                known = self._since.get(layer.id)
                if self._refused_by_share_only(facts, job, layer):
                    kept = known is not None and known[2] == progress
                    since[layer.id] = known if kept else (facts.now, facts.at, progress)
        self._since = since
        return list(self._inversions(facts))

    def _refused_by_share_only(self, facts, job, layer):
        queue = facts.queue[layer.queue]
        return (
            not queue.paused
            and facts.unclaimed(layer) > 0
            and all(
                facts.room(key, cap) >= queue.cores
                for key, cap in facts.limits(job, layer, None)
                if not key.startswith("share")
            )
        )

    def _inversions(self, facts):
        layers = {layer.id: layer for layer in facts.layers}
        for proc in facts.procs:
            if proc.token in self._seen or proc.job not in facts.job:
                continue
            self._seen.add(proc.token)
            low = facts.job[proc.job]
            for high_layer, (since, at, _) in self._since.items():
                high = facts.job[layers[high_layer].job]
                if high.show != low.show or facts.queue[layers[high_layer].queue].cores > proc.cores:
                    continue
                slowdown = self._disturbances.slowdown()
                limit_s = max(ORDER_LIMIT_S * slowdown, self._disturbances.limit_s(at, facts.at))
                waited_s = proc.booked - since
                if self._disturbances.outage(at, facts.at) or waited_s <= limit_s:
                    continue
                if effective(high, facts.now) > effective(low, facts.now) + LEVELS_MARGIN:
                    if self._claimed_at(facts, layers[high_layer], proc.claimed):
                        continue
                    sentence = f"{low.name} ({low.priority}) was booked, {high.name} ({high.priority}) waits"
                    sentence += self._about(facts, high, layers[high_layer], proc.pool)
                    yield Wait((high.id, low.id), waited_s, limit_s, f"{sentence} since {waited_s:.1f} s")

    @staticmethod
    def _claimed_at(facts, layer, moment):
        """Whether servers that gave them back later had claimed all its waiting frames at this moment."""
        claims = [
            each.frames
            for each in facts.returned
            if each.layer == layer.id and each.claimed <= moment + CLAIM_S and each.returned >= moment
        ]
        return sum(claims) >= facts.unclaimed(layer)

    @staticmethod
    def _about(facts, job, layer, pool):
        """What may keep the job from starting, for the report."""
        limits = [f"{key.partition(' ')[0]} {facts.used[key]} of {cap}" for key, cap in facts.limits(job, layer, pool)]
        show = facts.show[job.show]
        jobs = f"{show.jobs_used} of {show.jobs_max} jobs, has a place: {job.id in facts.slots}"
        now = facts.now
        returned = [
            f"{each.frames} claimed by {each.owner} from -{now - each.claimed:.3f} s to -{now - each.returned:.3f} s"
            for each in facts.returned
            if each.layer == layer.id
        ]
        parked = f"{facts.parked.get(job.id, 0)} parked"
        return f" [{', '.join([show.name, *limits, jobs, parked, *returned])}]"


def effective(job, now):
    """Priority with ageing."""
    return job.priority + max(0.0, now - job.submitted) / AGEING_S


def ended_processes(actors, expected):
    """L2: processes that ended on their own; `expected`: names of those that the test has ended."""
    return [f"{actor.name} ended with status {actor.process.returncode}" for actor in actors
            if actor.process is not None and not actor.alive and actor.name not in expected]  # fmt: skip


def stopped_runs(runs, cancelled, disturbances):
    """L3: runs that did not end although their worker was left alone; `cancelled`: jobs that were ended on purpose."""
    for run in runs:
        unfinished = run.ended is None and not run.raised and run.job not in cancelled
        if unfinished and not disturbances.of(run.worker, run.began):
            yield f"frame {run.frame} of job {run.job}, attempt {run.attempt}, was stopped on {run.worker}"
