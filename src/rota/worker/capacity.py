"""Free capacity of this worker. Frames that do not fit are refused, because a server's view may be stale. No I/O.

Capacity is reserved when frames are accepted, not when they start, and released when their end is known. Frames of one
layer have equal requirements, so a whole range costs one division per resource.
"""

from __future__ import annotations

from rota.model.jobs.work import Work
from rota.worker.registration_info import RegistrationInfo


class WorkerCapacity:
    def __init__(self, offer: RegistrationInfo) -> None:
        self.slots = offer.slots
        self.cores = offer.cores
        self.gpus = offer.gpus
        self.memory_mb = offer.memory_mb
        self._memory_counts = offer.memory_mb > 0
        self._devices = list(range(offer.gpus))

    def fitting_count(self, work: Work, n: int) -> int:
        """How many of `n` frames fit."""
        n = min(n, self.slots)
        if work.cores:
            n = min(n, self.cores // work.cores)
        if work.gpus:
            n = min(n, self.gpus // work.gpus)
        if work.memory_mb and self._memory_counts:
            n = min(n, self.memory_mb // work.memory_mb)
        return max(n, 0)

    def reserve(self, work: Work, n: int) -> None:
        self.slots -= n
        self.cores -= n * work.cores
        self.gpus -= n * work.gpus
        self.memory_mb -= n * work.memory_mb

    def release(self, work: Work, n: int) -> None:
        self.reserve(work, -n)

    def reserve_devices(self, n: int) -> tuple[int, ...]:
        """Picks GPUs for a frame that starts. Enough are free: `reserve` counted them on acceptance."""
        taken, self._devices = self._devices[:n], self._devices[n:]
        return tuple(taken)

    def release_devices(self, devices: tuple[int, ...]) -> None:
        self._devices.extend(devices)
