"""The same frames, ended by reports of one worker or of many.

The reports are those of workers that exist in name only: the frames are claimed and booked here, for a pool without a
worker, and a real server handles the reports. The clock runs from the first report to the end of the last frame.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final
from uuid import UUID, uuid4

from bench.e2e.deployment import ELSEWHERE, REDIS_DB, RUN_TIMEOUT_S, SHOW, Farm, until
from bench.e2e.setup import Ground
from bench.server import statement
from rota.accounting.ledger import BookingGroup, Charge
from rota.accounting.service import AccountingService
from rota.infra.lease import Lease, Leases
from rota.infra.nats import Bus, BusMessage, NatsTarget
from rota.infra.redis import RedisTarget, connect
from rota.model.ids import DeptId, FolderId, JobId, LayerId, PoolId, ShowId
from rota.model.jobs.submission import LayerSpec, Submission
from rota.model.protocol import RESULT_SUBJECT, Report, encode
from rota.model.token_ranges import to_ranges
from rota.model.units import Centicores

FRAMES: Final = 6000
REPORT_FRAMES_MAX: Final = 512
LEASE_S: Final = 60.0
POLL_S: Final = 0.005
PREFIX: Final = "BENDS"
PLACE = statement(
    """SELECT j.pk_show, j.pk_folder, j.pk_dept, l.pk_layer, l.queue, a.pk_alloc FROM rota.job j
       JOIN rota.layer l USING (pk_job), rota.alloc a WHERE j.pk_job = $1::uuid AND a.str_name = $2"""
)


class EndsBench:
    def __init__(self, running: Farm, accounting: AccountingService, bus: Bus, lease: Lease) -> None:
        self._running = running
        self._accounting = accounting
        self._bus = bus
        self._lease = lease

    async def lap(self, workers: int) -> float:
        """Frames ended a second."""
        job, reports = await self._book([uuid4() for _ in range(workers)])
        began = time.perf_counter()
        await self._bus.publish_many(reports)
        await until(lambda: self._has_ended(job), RUN_TIMEOUT_S, "the end of the reported frames", POLL_S)
        seconds = time.perf_counter() - began
        await self._running.ended()
        return FRAMES / seconds

    async def _has_ended(self, job: UUID) -> bool:
        """By an index lookup: to count the bookings that are left would take a good part of a core."""
        return not await self._running.count_live([job])

    async def _book(self, workers: Sequence[UUID]) -> tuple[UUID, list[BusMessage]]:
        running = self._running
        running.expect(FRAMES)
        layer = LayerSpec(task="noop", frames=FRAMES)
        [made] = await running.submitter.submit([Submission(show=SHOW, topic=ELSEWHERE, layers=(layer,))])
        place = await running.database.row(PLACE, made.job, ELSEWHERE)
        assert place is not None
        charge = Charge(
            PoolId(place["pk_alloc"]),
            FolderId(place["pk_folder"]),
            JobId(made.job),
            LayerId(place["pk_layer"]),
            DeptId(place["pk_dept"]),
            Centicores(100),
        )
        tokens: list[int] = []
        while len(tokens) < FRAMES:
            lanes = [lane.lane for lane in await running.queue.candidates([place["queue"]])]
            for claim in await running.queue.claim(lanes, REPORT_FRAMES_MAX, self._lease.fence):
                tokens += [token for each in claim.ranges() for token in each.tokens]
        each = FRAMES // len(workers)
        reports: list[BusMessage] = []
        for number, worker in enumerate(workers):
            mine = tokens[number * each : (number + 1) * each]
            for first in range(0, each, REPORT_FRAMES_MAX):
                part = mine[first : first + REPORT_FRAMES_MAX]
                await self._accounting.book(ShowId(place["pk_show"]), [BookingGroup(charge, worker, part)])
                report = encode(Report(worker, to_ranges(part), took_ms=len(part)))
                reports.append(BusMessage(subject=RESULT_SUBJECT, data=report, msg_id=str(uuid4())))
        return made.job, reports


@asynccontextmanager
async def ends_bench(ground: Ground, running: Farm) -> AsyncIterator[EndsBench]:
    """For a farm whose NATS prefix is `PREFIX`."""
    async with AsyncExitStack() as closing:
        client = connect(RedisTarget(url=ground.redis_url(REDIS_DB)))
        closing.push_async_callback(client.aclose)
        bus = await Bus.connect(NatsTarget(url=ground.nats_url, prefix=PREFIX, publish_timeout_s=20.0))
        closing.push_async_callback(bus.close)
        leases = Leases(running.database)
        lease = await closing.enter_async_context(leases.hold("dispatcher:bench", kind="dispatcher", ttl_s=LEASE_S))
        await running.queue.register_owner(lease)
        yield EndsBench(running, AccountingService(running.database, client), bus, lease)
