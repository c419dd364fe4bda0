"""A farm in virtual time: the real order, rounds and placement, with queues, bookings and frames in memory.

farm = SimulatedFarm({"film": 96, "short": 32}, workers=4, slots=32)
farm.submit("film", frames=100, runs_s=60.0)
farm.run_until(3600.0)
assert farm.starts[0].at_s == 0.0
"""

from collections import Counter, deque
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple
from uuid import UUID

from rota.accounting.ledger import NIL_UUID, BookingGroup, Charge
from rota.engine.dispatch.dispatcher import PROMPT_ROUNDS_MAX
from rota.engine.dispatch.ordering import queue_rank
from rota.engine.dispatch.pending_queues import PendingQueue, PendingQueues, QueueKey
from rota.engine.dispatch.rounds import RoundPlanner
from rota.model.quota import Usage
from rota.placement import requirements_of
from tests.support.placement import Fleet, id_of, pool, routes

BEAT_S = 20.0
TURN_S = 0.005
"""Frames that end within this time are seen by one turn, as rounds take about so long."""


class Start(NamedTuple):
    at_s: float
    show: str
    priority: int
    job: int
    worker: UUID
    waited_s: float


class WaitingFrames:
    """Frames of one job, in their queue."""

    def __init__(self, job, at_s, frames, runs_s):
        self.job = job
        self.at_s = at_s
        self.frames = frames
        self.runs_s = runs_s


class SimulatedFarm:
    def __init__(self, sizes, *, workers=1, slots=8, cores=None, pools=("farm",), elsewhere=None, reads_s=1.0,
                 minimums=None, round_s=(0.0, 0.0), beats_s=BEAT_S):  # fmt: skip
        """`sizes`: cores by show in every pool that has workers; `elsewhere`: by show in a pool without workers;
        `minimums`: cores by folder, which is part of a job, in the show `film`; `round_s`: how long a round takes to
        claim, and then to book and send; `beats_s`: between two heartbeats of a worker."""
        every = [pool(name) for name in (*pools, "empty")]
        self.fleet = Fleet(routes({"*": (*pools, "empty")}, *every), ttl_s=1.5 * beats_s)
        self.clock, self.registry = self.fleet.clock, self.fleet.registry
        self.begun_s = self.clock.now_s
        self.queues = PendingQueues(self.clock, self.registry.usable_pools, lambda: self.registry.shape_version)
        self.registry.capacity_listeners.append(self.queues.workers_changed)
        self.planner = RoundPlanner(self.queues, self.registry, lambda: True)
        self.starts = []
        self.inversions = []
        self.rounds = 0
        self.round_s = round_s
        self._in_flight = 0
        self.used = Counter()
        self.used_by_folder = Counter()
        self.core_s = Counter()
        self._counted_s = self.clock.now_s
        self._beats_s = beats_s
        self._beats = [
            (f"{name}{number}", {"pool": name, "slots": slots, "cores": 100 * (cores or slots)})
            for name in pools
            for number in range(workers)
        ]
        self._shows = {show: id_of(f"show {show}") for show in sizes}
        self._names = {each: show for show, each in self._shows.items()}
        self._sizes = {(self._shows[show], each.id): 100 * size for show, size in sizes.items() for each in every[:-1]}
        self._sizes |= {(self._shows[show], every[-1].id): 100 * size for show, size in (elsewhere or {}).items()}
        self._minimums = {(self._shows["film"], id_of(f)): Usage(100 * n) for f, n in (minimums or {}).items()}
        self._pool_of = {name: each.id for name, each in zip(pools, every, strict=False)}
        self._waiting = {}
        self._turn_due = False
        self._events = []
        self._numbers = count()
        self._jobs = count(1)
        self._tokens = count(1_000)
        self._at(0.0, self._beat)
        self._at(0.0, self._read, reads_s)

    @property
    def now_s(self):
        return self.clock.now_s - self.begun_s

    def submit_at(self, at_s, show, **job):
        self._at(at_s, self.submit, show, job)

    def submit(self, show, job=None, **more):
        """Queue a job: `frames`, `runs_s` (each), `priority`, and what a frame needs."""
        given = {"frames": 1, "runs_s": 1.0, "priority": 5, "queue": "q", **(job or {}), **more}
        frames, runs_s, priority = given.pop("frames"), given.pop("runs_s"), given.pop("priority")
        folder = given.pop("folder", "any")
        name = f"{show}/{folder}/{given.pop('queue')}/{sorted(given.items())}"
        if (name, priority) not in self._waiting:
            self._waiting[name, priority] = deque()
            key = QueueKey(name, self._shows[show], id_of(folder), UUID(int=2), requirements_of("t", **given))
            self.queues.add(PendingQueue(key, priority, [1]))
        number = next(self._jobs)
        self._waiting[name, priority].append(WaitingFrames(number, self.clock.now_s, frames, runs_s))
        self.queues.mark_notified(name)
        self._take_turns()
        return number

    def run_until(self, at_s):
        while self._events and self._events[0][0] <= self.begun_s + at_s:
            self.clock.now_s, _, step, given = heappop(self._events)
            step(*given)
        self.clock.now_s = self.begun_s + at_s
        self._count_use()

    def shares(self):
        """The part of the cores that each show has used so far."""
        total = sum(self.core_s.values())
        return {show: used / total for show, used in self.core_s.items()}

    def reset_shares(self):
        self._count_use()
        self.core_s.clear()

    def _at(self, at_s, step, *given):
        heappush(self._events, (self.begun_s + at_s, next(self._numbers), step, given))

    def _later(self, in_s, step, *given):
        heappush(self._events, (self.clock.now_s + in_s, next(self._numbers), step, given))

    def _beat(self):
        for name, fields in self._beats:
            self.fleet.beat(name, **fields)
        self._later(self._beats_s, self._beat)

    def _read(self, every_s):
        """As a poll of PostgreSQL."""
        usage = Counter()
        for (show, pool_id), cores in self.used.items():
            usage[show, pool_id] += cores
        shares = {at: (size, usage[at]) for at, size in self._sizes.items()}
        self.queues.set_shares(shares)
        used = {key: Usage(self.used_by_folder[key]) for key in self._minimums}
        self.queues.set_minimums(self._minimums, used)
        for at, pending in self.queues.entries.items():
            self._set_age(pending, self._waiting[at])
            pending.waiting = sum(each.frames for each in self._waiting[at])
            pending.counted = True
        self._take_turns()
        if any(self._waiting.values()):
            self._later(every_s, self._read, every_s)
        else:
            self._later(max(60.0, every_s), self._read, every_s)

    def _set_age(self, pending, lane):
        if lane and pending.since_s != lane[0].at_s:
            pending.since_s = lane[0].at_s
            self.queues._groups.changed(pending)

    def _take_turns(self):
        if self._turn_due:
            self._turn_due = False
            self.queues.workers_changed()
        begun = True
        while begun:
            begun = False
            order = self.queues.order()
            for pending in order:
                if self._in_flight == PROMPT_ROUNDS_MAX:
                    break
                if self.registry.is_full(order.group.pools):
                    order.skip_group()
                elif (planned := self.planner.plan_round(pending, order)) is not None:
                    self._do(planned)
                    begun = True
                    break

    def _do(self, planned):
        self.rounds += 1
        if not any(self.round_s):
            self._book(planned, self._claim(planned))
            return
        self._in_flight += 1
        self._later(self.round_s[0], self._claim_and_book, planned)

    def _claim_and_book(self, planned):
        self._later(self.round_s[1], self._book_and_end, planned, self._claim(planned))
        self._take_turns()

    def _book_and_end(self, planned, claimed):
        self._in_flight -= 1
        self._book(planned, claimed)
        self._take_turns()

    def _claim(self, planned):
        """The frames of each part: from now on other rounds may claim from its queue."""
        claimed = []
        for part in planned.parts:
            pending, most = part.pending, part.plan.planned
            lane = self._waiting[pending.key.queue, pending.priority]
            got = min(most, sum(each.frames for each in lane))
            part.plan = self.registry.spread_again(pending.key.cls, part.plan, part.reservation, got)
            if got:
                self._note_inversions(pending)
            claimed.append(self._take(lane, got))
            self.queues.frames_claimed(pending, most, got, part.arrivals, ended=True)
            pending.busy = False
            self._set_age(pending, lane)
            self.queues.shrink_share(pending, part.share, got)
        return claimed

    def _take(self, lane, n):
        """The first frames of the lane, as jobs and their number."""
        taken = []
        while n:
            head = lane[0]
            taken.append([head, min(n, head.frames)])
            n -= taken[-1][1]
            head.frames -= taken[-1][1]
            if not head.frames:
                lane.popleft()
        return taken

    def _book(self, planned, claimed):
        for part, frames in zip(planned.parts, claimed, strict=True):
            pending = part.pending
            asked = self.queues.moment(pending)
            got = left = sum(n for _, n in frames)
            for portion in part.plan.portions:
                n = min(portion.n, left)
                left -= n
                if n:
                    self._start(pending, frames, portion, n)
                    self.queues.frames_booked(pending, portion.pool_id, n, asked)
            self.registry.unreserve(part.reservation, allocated=got)
            self.queues.shrink_share(pending, part.share, 0)

    def _start(self, pending, frames, portion, n):
        show, need = self._names[pending.key.show], pending.key.cls.need
        while n:
            job, waiting = frames[0]
            taken = min(n, waiting)
            frames[0][1] -= taken
            if taken == waiting:
                frames.pop(0)
            n -= taken
            first = next(self._tokens)
            self._tokens = count(first + taken)
            self.registry.record_allocations(portion.worker, [(first, taken)], need)
            self._count_use()
            self.used[pending.key.show, portion.pool_id] += taken * need.cores
            self.used_by_folder[pending.key.show, pending.key.folder] += taken * need.cores
            waited_s = self.clock.now_s - job.at_s
            start = Start(self.now_s, show, pending.priority, job.job, portion.worker, waited_s)
            self.starts += [start] * taken
            self._later(job.runs_s, self._end, pending.key, portion, first, taken)

    def _end(self, key, portion, first, n):
        self._count_use()
        self.used[key.show, portion.pool_id] -= n * key.cls.need.cores
        self.used_by_folder[key.show, key.folder] -= n * key.cls.need.cores
        charge = Charge(portion.pool_id, key.folder, NIL_UUID, NIL_UUID, key.dept, key.cls.need.cores, 0)
        self.queues.bookings_released(key.show, [BookingGroup(charge, portion.worker, range(first, first + n))])
        self.registry.release_allocations(portion.worker, [(first, n)])
        self.queues.capacity_released(key.show, n, {portion.pool_id: Usage(n * key.cls.need.cores)})
        if not self._turn_due:
            self._turn_due = True
            self._later(TURN_S, self._take_turns)

    def _count_use(self):
        passed_s, self._counted_s = self.clock.now_s - self._counted_s, self.clock.now_s
        for (show, _), cores in self.used.items():
            self.core_s[self._names[show]] += passed_s * cores / 100

    def _note_inversions(self, pending):
        """Queues of the same show and need that wait and rank before one that is served."""
        now_s = self.clock.now_s
        for at, lane in self._waiting.items():
            other = self.queues.entries[at]
            if lane and not other.busy and other.key.show == pending.key.show and other.key.cls == pending.key.cls:
                served = self._waiting[pending.key.queue, pending.priority][0]
                theirs, ours = (
                    queue_rank(at[1], now_s - lane[0].at_s),
                    queue_rank(pending.priority, now_s - served.at_s),
                )
                if theirs[1] < ours[1] - 0.01:
                    self.inversions.append((self.now_s, at, pending.priority))
