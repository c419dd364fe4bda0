"""What is free on this worker. Whatever does not fit is refused: servers may know less than we do. No I/O.

Room is taken when frames are accepted, not when they begin, and given back when their end is known. Frames of one layer
ask for the same, so a run of them is one division per kind of room.
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
        """How many of `n` frames there is room for."""
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
        """Which GPUs a frame gets when it begins. There are enough, since room for it was taken."""
        taken, self._devices = self._devices[:n], self._devices[n:]
        return tuple(taken)

    def release_devices(self, devices: tuple[int, ...]) -> None:
        self._devices.extend(devices)
