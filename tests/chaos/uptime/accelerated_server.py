"""`rota server` for which a day lasts DAY_S seconds, for tests of long uptime.

    DAY_S=25 python -m tests.chaos.uptime.accelerated_server server

Whatever is done by age is done as often per day as in production: the ring of the queue turns, failed frames expire,
and at the end of each day all that has ended is past its retention, so that its partitions and keys are removed. The
clocks stay as they are: rows keep their real times, and the day that is dropped is the real one.
"""

import os
from datetime import timedelta

import rota.runtime
from rota.accounting import maintenance as accounting_maintenance
from rota.cli.main import main
from rota.engine.recovery import retention
from rota.queue import MaintenanceIntervals

DAY_S = float(os.environ.get("DAY_S", "25"))
ACCELERATION = 86_400 / DAY_S
FOLD_S = 1.0
"""The shortest interval of the ring: it turns less often than 1,440 times a day."""
TOMBSTONES_MAX = 300
"""So few that the fences of shows rise several times a day."""


class AcceleratedRetention(retention.RetentionMaintenance):
    async def drop_days(self, lease, **_more):
        dropped = await super().drop_days(lease, before=await self._now() + timedelta(days=1))
        await self.make_days(lease)
        return dropped

    async def _time_ago(self, _seconds):
        return await self._now()


def accelerate():
    retention.INTERVAL_S = retention.CAPS_INTERVAL_S = retention.STORE_INTERVAL_S = DAY_S
    retention.LEASE_RETENTION_S = DAY_S
    accounting_maintenance.TOMBSTONES_MAX = TOMBSTONES_MAX
    rota.engine.engine.RetentionMaintenance = AcceleratedRetention
    rota.runtime.MaintenanceIntervals = lambda **_more: MaintenanceIntervals(
        expire_s=FOLD_S, slot_age_s=max(FOLD_S, 60 / ACCELERATION), failed_retention_s=DAY_S
    )


if __name__ == "__main__":
    accelerate()
    main()
