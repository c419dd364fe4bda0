"""Helpers for queue tests: an empty database, a dispatcher, and counts checked against the rows."""

from uuid import UUID, uuid4

from rota.infra.lease import Leases
from rota.infra.postgres.sql import parse_query
from rota.queue import ClaimRequest, Queue, QueueEntry, QueueMaintenance
from tests.support.waiting import until

# For a few rows, DELETE takes a tenth of the time of TRUNCATE, which creates new files.
TABLES = (
    *("ready_entries", "queue_claims", "queue_closures", "ready_tombstones", "queue_returned", "queue_owners"),
    *("deferred_jobs", "done_entries", "dlq_entries", "queue_terminal_count_deltas", "queue_terminal_live_counts"),
    *("queue_terminal_rollups", "queue_lane_bases", "queue_lanes", "queues", "queue_ring_rotations", "lease"),
)
EMPTY = "; ".join(
    [
        *(f"DELETE FROM rota.{table}" for table in TABLES),
        "INSERT INTO rota.queue_ring_rotations VALUES (7)",
        "UPDATE rota.queue_storage SET counter_mode = 'ledger', counters_trusted = true",
    ]
)


def sql(text):
    return parse_query("test", f"-- Test.\n{text}")


SCAN = sql("SELECT * FROM rota.queue_counts_scan()")
EXACT = sql("SELECT * FROM rota.queue_counts_exact()")
GENERATION = sql("SELECT rota.queue_generation()")
FIELDS = ("waiting", "running", "deferred", "completed", "failed", "cancelled", "dead")


def entry(queue="film", *, job=None, **more):
    job = job or uuid4()
    return QueueEntry(queue=queue, job=job, layer=more.pop("layer", UUID(int=job.int ^ 1)), **more)


class Dispatcher:
    """Claims under its own lease."""

    def __init__(self, database, name="one"):
        self.queue = Queue(database)
        self.leases = Leases(database)
        self.name = name

    async def enlisted(self, ttl_s=60.0):
        attempt = await self.leases.acquire([f"dispatcher:{self.name}"], kind="dispatcher", ttl_s=ttl_s)
        [self.lease] = attempt.granted
        self.owner = await self.queue.register_owner(self.lease)
        return self

    async def claim(self, want=256, lanes=None):
        """Claim from these lanes, or from all lanes with waiting entries."""
        lanes = lanes or [candidate.lane for candidate in await self.queue.candidates()]
        return await self.queue.claim(lanes, want, self.owner) if lanes else []

    async def claim_each(self, want, lanes=None):
        """Claim up to `want` from each of these lanes, or of all with waiting entries, as requests of one call."""
        lanes = lanes or [candidate.lane for candidate in await self.queue.candidates()]
        return await self.queue.claim_each([ClaimRequest([lane], want) for lane in lanes], self.owner) if lanes else []

    async def pieces(self, want=256):
        return [piece for claim in await self.claim(want) for piece in claim.ranges()]

    async def tokens(self, want=256):
        return [token for claim in await self.claim(want) for token in claim.tokens]


class Leader:
    """Queue maintenance stepped by the test under a lease: `await leader.fold()`."""

    def __init__(self, maintenance, lease):
        self.maintenance, self.lease = maintenance, lease

    @classmethod
    async def of(cls, queue, pace):
        async def none_booked(tokens):
            return set(tokens)

        leases = Leases(queue.database)
        [lease] = (await leases.acquire(["queue:upkeep"], kind="leader", ttl_s=60.0)).granted
        return cls(QueueMaintenance(queue, leases, none_booked, pace), lease)

    def __getattr__(self, step):
        return lambda: getattr(self.maintenance, step)(self.lease)


async def counted(database, query=EXACT):
    """Counts by queue as a plain dictionary, without queues that were never used."""
    rows = await database.rows(query)
    return {row["queue"]: plain for row in rows if any((plain := {field: row[field] for field in FIELDS}).values())}


async def agreed(database):
    """The exact counts, checked against the rows."""
    exact, rows = await counted(database), await counted(database, SCAN)
    assert exact == rows
    return exact


OTHERS_IDLE = sql("""
SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
                   AND xact_start IS NOT NULL)""")


async def sessions_over(database):
    """Wait until PostgreSQL has ended the sessions of a dead process, which hold their locks until then."""
    await until(
        lambda: database.value(OTHERS_IDLE), what="PostgreSQL to roll back the transactions of the dead process"
    )
