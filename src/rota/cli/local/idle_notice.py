"""Tells the user of `rota up` that frames wait for cores while the machine does little.

A frame that waits for a network or a disk books its cores all the same. Booked cores are a promise of the job's author,
so Rota does not hand them out twice; the author can ask for less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from rota.infra.clock import Clock
from rota.infra.service import Lifecycle, Service
from rota.model.reasons import Reason
from rota.placement.workers import WorkerInfo

POLL_INTERVAL_S: Final = 5.0
IDLE_POLLS: Final = 3
"""Polls in a row that must find it, so that the gap between two frames is not mistaken for idleness."""
REPEAT_AFTER_S: Final = 3600.0
CPU_PERCENT_MAX: Final = 30.0
PART_BOOKED_MIN: Final = 0.9
BOOKED_REASONS: Final = (Reason.QUEUED, Reason.POOL_OVERLOADED, Reason.QUOTA_SUBSCRIPTION)
"""Reasons of frames that wait for cores of this machine: the show of `rota up` has a share of all its cores."""


class IdleNotice:
    def __init__(
        self,
        worker: Callable[[], WorkerInfo | None],
        waiting: Callable[[], Mapping[str, int]],
        print_note: Callable[[str], None],
        clock: Clock,
    ) -> None:
        """`waiting`: the number of waiting frames by reason."""
        self._worker = worker
        self._waiting = waiting
        self._print = print_note
        self._clock = clock
        self._polls = 0
        self._printed_at_s = -REPEAT_AFTER_S

    @property
    def service(self) -> Service:
        return Service("idle_notice", self._run)

    async def _run(self, life: Lifecycle) -> None:
        life.ready()
        while not life.draining:
            self.poll()
            await life.pause(POLL_INTERVAL_S)

    def poll(self) -> None:
        worker = self._worker()
        waiting = self._waiting()
        if (
            worker is None
            or not any(waiting.get(reason.value) for reason in BOOKED_REASONS)
            or not is_idle_but_booked(worker)
        ):
            self._polls = 0
            return
        self._polls += 1
        now = self._clock.monotonic()
        if self._polls >= IDLE_POLLS and now - self._printed_at_s >= REPEAT_AFTER_S:
            self._printed_at_s = now
            self._print(
                f"Frames wait because all {worker.cores / 100:g} cores are booked, but the machine is only"
                f" {worker.load.cpu:.0f} % busy: frames that mostly wait can ask for less, such as @app.task(cores=0.1)"
                " or `rota submit --cores 0.1`."
            )


def is_idle_but_booked(worker: WorkerInfo) -> bool:
    return (
        worker.cores > 0
        and worker.booked.cores >= worker.cores * PART_BOOKED_MIN
        and worker.load.cpu <= CPU_PERCENT_MAX
    )
