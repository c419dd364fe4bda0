"""What PostgreSQL holds at one moment: live jobs, bookings, limits, queue counts and workers. Everything that a server
says is compared with it.

All of it comes from one snapshot. The locks are taken before the snapshot, because the queue truncates tables, which an
older snapshot would see as empty.
"""

import time
from collections import Counter
from functools import cached_property

import asyncpg
import msgspec

LOCK = """
LOCK TABLE rota.queue_terminal_count_deltas, rota.queue_claims, rota.queue_closures, rota.ready_entries
IN ACCESS SHARE MODE"""
READ = """
SELECT jsonb_build_object(
  'now', extract(epoch FROM clock_timestamp()),
  'claims', (SELECT last_value FROM rota.queue_claim_ids),
  'leader', EXISTS (SELECT FROM rota.lease WHERE name = 'rota:reconciler:default' AND expires_at > clock_timestamp()),
  'jobs', (SELECT jsonb_agg(jsonb_build_object(
     'id', pk_job, 'show', pk_show, 'folder', pk_folder, 'dept', pk_dept, 'priority', priority, 'state', state,
     'reason', reason, 'ends_as', ends_as, 'failures', dispatch_failures, 'version', xmin::text || ctid::text,
     'submitted', extract(epoch FROM ts_submitted), 'name', str_name)) FROM rota.job),
  'done', (SELECT jsonb_object_agg(pk_show, n) FROM (SELECT pk_show, count(*) AS n FROM rota.job_done GROUP BY 1) d),
  'layers', (SELECT jsonb_agg(jsonb_build_object(
     'id', l.pk_layer, 'job', l.pk_job, 'queue', l.queue, 'frames', l.frames,
     'ended', l.succeeded + l.quarantined + l.failed + l.timed_out + l.cancelled + l.denied,
     'deferred', coalesce(d.n, 0), 'due', coalesce(d.due, 0),
     'attempt', (SELECT max(e.attempt) FROM rota.ready_entries e
                 WHERE e.job_id = l.pk_job AND e.layer_id = l.pk_layer)))
     FROM rota.layer l LEFT JOIN (
       SELECT layer_id, sum(n) AS n, sum(n) FILTER (WHERE run_at <= clock_timestamp()) AS due
       FROM rota.deferred_jobs GROUP BY 1) AS d ON d.layer_id = l.pk_layer),
  'procs', (SELECT jsonb_agg(jsonb_build_object(
     'show', pk_show, 'pool', pk_alloc, 'folder', pk_folder, 'dept', pk_dept, 'job', pk_job, 'layer', pk_layer,
     'host', pk_host, 'cores', int_cores_reserved, 'token', token, 'booked', extract(epoch FROM ts_booked),
     'claimed', (SELECT extract(epoch FROM claimed_at) FROM rota.queue_claims WHERE claim_id = token / 512)))
     FROM rota.proc),
  'queues', (SELECT jsonb_agg(jsonb_build_object(
     'name', q.queue, 'paused', q.paused, 'cores', c.cores, 'folder', k.pk_folder, 'dept', k.pk_dept,
     'show', k.pk_show))
     FROM rota.queues q JOIN rota.queue_class k USING (queue) JOIN rota.placement_class c USING (class_id)),
  'scanned', (SELECT jsonb_object_agg(queue, counts) FROM (
     SELECT l.queue, jsonb_build_object(
       'waiting', sum(s.waiting), 'running', sum(s.running), 'deferred', sum(s.deferred)) AS counts
     FROM rota.queue_scan() s JOIN rota.queue_lanes l USING (lane_id) GROUP BY 1) AS c),
  'counted', (SELECT jsonb_object_agg(queue, counts) FROM (
     SELECT l.queue, jsonb_build_object(
       'waiting', sum(s.waiting), 'running', sum(s.running), 'deferred', sum(s.deferred)) AS counts
     FROM (SELECT lane_id, waiting, running, deferred FROM rota.queue_terminal_live_counts
           UNION ALL SELECT lane_id, waiting, running, deferred FROM rota.queue_terminal_count_deltas) AS s
     JOIN rota.queue_lanes l USING (lane_id) GROUP BY 1) AS c),
  'parked', (SELECT jsonb_object_agg(parked_job, n) FROM (
     SELECT parked_job, sum(n) AS n FROM rota.queue_returned WHERE parked_job IS NOT NULL GROUP BY 1) AS p),
  'unbooked', (SELECT jsonb_agg(jsonb_build_object('claim', claim_id, 'layer', layer_id, 'frames', n)) FROM (
     SELECT o.claim_id, e.layer_id, count(*) AS n FROM (
       SELECT c.*, c.last_seq - c.n + 1 + i AS seq FROM rota.queue_claims c, generate_series(0, c.n - 1) AS i
       WHERE c.n > (SELECT coalesce(sum(x.n), 0) FROM rota.queue_closures x
                    WHERE x.ready_slot = c.ready_slot AND x.claim_id = c.claim_id)
         AND NOT EXISTS (SELECT FROM rota.queue_closures x
                         WHERE x.ready_slot = c.ready_slot AND x.claim_id = c.claim_id AND get_bit(x.bits, i) = 1)
         AND NOT EXISTS (SELECT FROM rota.proc p WHERE p.token = c.claim_id * 512 + i)) AS o
     JOIN rota.ready_entries e ON e.lane_id = o.lane_id AND e.lane_seq <= o.seq AND e.lane_seq + e.n > o.seq
     GROUP BY 1, 2) AS u),
  'returned', (SELECT jsonb_agg(jsonb_build_object('layer', layer_id, 'frames', n, 'owner', owner,
     'claimed', extract(epoch FROM claimed_at), 'returned', extract(epoch FROM finalized_at))) FROM (
     SELECT e.layer_id, c.owner, c.claimed_at, x.finalized_at, count(*) AS n
     FROM rota.queue_closures x JOIN rota.queue_claims c USING (ready_slot, claim_id)
     CROSS JOIN generate_series(0, c.n - 1) AS i
     CROSS JOIN LATERAL (SELECT c.last_seq - c.n + 1 + i AS seq) AS p
     JOIN rota.ready_entries e ON e.lane_id = c.lane_id AND e.lane_seq <= p.seq AND e.lane_seq + e.n > p.seq
     WHERE x.outcome = 5 AND get_bit(x.bits, i) = 1 AND x.finalized_at > clock_timestamp() - interval '10 seconds'
     GROUP BY 1, 2, 3, 4) AS r),
  'shows', (SELECT jsonb_agg(jsonb_build_object('id', pk_show, 'name', str_name, 'managed', b_scheduler_managed,
     'fence', int_fence, 'jobs_max', int_max_jobs, 'jobs_used', rota.job_slots_used(pk_show))) FROM rota.show),
  'shares', (SELECT jsonb_agg(jsonb_build_object('show', s.pk_show, 'pool', s.pk_alloc, 'name', a.str_name,
     'burst', s.int_burst)) FROM rota.subscription s JOIN rota.alloc a USING (pk_alloc)),
  'caps', (SELECT jsonb_object_agg(key, cores) FROM (
     SELECT 'folder ' || pk_folder AS key, int_max_cores AS cores FROM rota.folder_resource
     UNION ALL SELECT 'dept ' || pk_show || ' ' || pk_dept, int_max_cores FROM rota.point
     UNION ALL SELECT 'job ' || pk_job, int_max_cores FROM rota.job_resource
     UNION ALL SELECT 'layer ' || pk_layer, int_max_cores FROM rota.layer_resource) AS c WHERE cores > 0),
  'slots', (SELECT jsonb_agg(pk_job) FROM rota.job_slot),
  'dependent', (SELECT jsonb_agg(DISTINCT pk_job) FROM rota.job_after),
  'workers', (SELECT jsonb_agg(jsonb_build_object('host', pk_host, 'name', str_name, 'pool', pk_alloc,
     'up', extract(epoch FROM ts_up))) FROM rota.worker WHERE state = 'up'))::text"""
NOT_QUEUED = ("PENDING", "APPROVAL_REQUIRED")
ON_WORKER = ("DISPATCHED", "RUNNING")
LOCK_TIMEOUT_MS = 500


class Job(msgspec.Struct):
    id: str
    show: str
    folder: str
    dept: str
    priority: int
    state: str
    reason: str | None = None
    ends_as: str | None = None
    failures: int = 0
    version: str = ""
    """Changes with every write of its row."""
    submitted: float = 0.0
    name: str = ""

    @property
    def queued(self):
        return self.state not in NOT_QUEUED and self.ends_as is None


class Layer(msgspec.Struct):
    id: str
    job: str
    queue: str
    frames: int
    ended: int = 0
    deferred: int = 0
    due: int = 0
    """Those of the deferred frames whose time has come."""
    attempt: int | None = None
    """The highest of its frames so far: it grows when a frame is retried."""


class Proc(msgspec.Struct):
    show: str
    pool: str
    folder: str
    dept: str
    job: str
    layer: str
    host: str
    cores: int
    token: int
    booked: float = 0.0
    claimed: float = 0.0

    def charged(self):
        """Every key that it counts against, as in `Facts.caps` and `Facts.shares`."""
        yield f"share {self.show} {self.pool}"
        yield f"folder {self.folder}"
        yield f"dept {self.show} {self.dept}"
        yield f"job {self.job}"
        yield f"layer {self.layer}"


class Queue(msgspec.Struct):
    name: str
    cores: int
    show: str
    folder: str
    dept: str
    paused: bool = False


class Show(msgspec.Struct):
    id: str
    name: str
    managed: bool = True
    fence: int = 1
    jobs_max: int = -1
    jobs_used: int = 0


class Share(msgspec.Struct):
    show: str
    pool: str
    name: str
    burst: int


class Worker(msgspec.Struct):
    host: str
    name: str
    pool: str
    up: float


class Counts(msgspec.Struct):
    waiting: int = 0
    running: int = 0
    deferred: int = 0

    @property
    def total(self):
        return self.waiting + self.running + self.deferred


class UnbookedClaim(msgspec.Struct):
    """Frames of a layer that a server has claimed and neither booked nor given back."""

    claim: int
    layer: str
    frames: int


class ReturnedClaim(msgspec.Struct):
    """Frames of a layer that a server has claimed and given back in the last seconds."""

    layer: str
    frames: int
    owner: int
    claimed: float
    returned: float


class Facts(msgspec.Struct, dict=True):
    """Times are of PostgreSQL's clock, but `at` is of our monotonic clock; cores are in hundredths."""

    now: float = 0.0
    claims: int = 0
    """Claims of frames so far: no frame starts without one."""
    leader: bool = True
    jobs: list[Job] = []
    done: dict[str, int] = {}
    """Ended jobs by show."""
    layers: list[Layer] = []
    procs: list[Proc] = []
    queues: list[Queue] = []
    scanned: dict[str, Counts] = {}
    """Counts by queue, from the rows of the queue."""
    counted: dict[str, Counts] = {}
    """The same from its counters."""
    parked: dict[str, int] = {}
    unbooked: list[UnbookedClaim] = []
    returned: list[ReturnedClaim] = []
    shows: list[Show] = []
    shares: list[Share] = []
    caps: dict[str, int] = {}
    slots: list[str] = []
    dependent: list[str] = []
    workers: list[Worker] = []
    at: float = 0.0

    @cached_property
    def job(self):
        return {job.id: job for job in self.jobs}

    @cached_property
    def layers_of(self):
        found = {}
        for layer in self.layers:
            found.setdefault(layer.job, []).append(layer)
        return found

    @cached_property
    def tokens(self):
        """Booked tokens by job."""
        found = {}
        for proc in self.procs:
            found.setdefault(proc.job, set()).add(proc.token)
        return found

    @cached_property
    def booked(self):
        """Booked frames by layer."""
        return Counter(proc.layer for proc in self.procs)

    @cached_property
    def used(self):
        """Cores by key."""
        used = Counter()
        for proc in self.procs:
            for key in proc.charged():
                used[key] += proc.cores
        return used

    @cached_property
    def queue(self):
        return {queue.name: queue for queue in self.queues}

    @cached_property
    def show(self):
        return {show.id: show for show in self.shows}

    def waiting(self, layer):
        """Frames of a layer that are due and on no worker, whether claimable, parked or claimed."""
        return max(0, layer.frames - layer.ended - layer.deferred + layer.due - self.booked[layer.id])

    def unclaimed(self, layer):
        """Waiting frames of a layer that no server has claimed."""
        return self.waiting(layer) - sum(each.frames for each in self.unbooked if each.layer == layer.id)

    def frames_of(self, job):
        """Waiting frames (deferred ones too), and those on workers."""
        layers = self.layers_of.get(job, [])
        on_workers = sum(self.booked[layer.id] for layer in layers)
        return sum(layer.frames - layer.ended for layer in layers) - on_workers, on_workers

    def limits(self, job, layer, pool):
        """Every limit of a frame in this pool: key and cap."""
        for share in self.shares:
            if share.show == job.show and share.pool == pool:
                yield f"share {job.show} {pool}", share.burst
        for key in (f"folder {job.folder}", f"dept {job.show} {job.dept}", f"job {job.id}", f"layer {layer.id}"):
            if key in self.caps:
                yield key, self.caps[key]

    def room(self, key, cap):
        return cap - self.used[key]


def decode(text):
    raw = msgspec.json.decode(text)
    present = {name: value for name, value in raw.items() if value is not None}
    return msgspec.convert(present, Facts, strict=False)


class FactsReader:
    """Reads facts on a connection of its own, which it opens again after an outage."""

    def __init__(self, url):
        self._url = url
        self._connection = None

    async def read(self):
        """Raises OSError, asyncpg errors or TimeoutError while PostgreSQL is away, locked or slow."""
        if self._connection is None or self._connection.is_closed():
            self._connection = await asyncpg.connect(self._url, timeout=2, command_timeout=5)
            await self._connection.execute(f"SET lock_timeout = {LOCK_TIMEOUT_MS}; SET jit = off")
        try:
            async with self._connection.transaction(isolation="repeatable_read"):
                await self._connection.execute(LOCK)
                facts = decode(await self._connection.fetchval(READ))
        except BaseException:
            self._drop()
            raise
        facts.at = time.monotonic()
        return facts

    def _drop(self):
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()

    def close(self):
        self._drop()


AWAY = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, TimeoutError)
