"""Resources and load of the host, read from the kernel; GPUs from NVML if installed.

In a container, cgroup limits apply. Unreadable values are 0, never an error.
"""

from __future__ import annotations

import os
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from rota.worker.registration_info import HostLoad

_MIB: Final = 1024 * 1024
_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def cores() -> int:
    """CPUs this process may use, in hundredths of a core."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 100 * count


def memory_mb() -> int:
    total = _meminfo().get("MemTotal", 0) // 1024
    limits = [int(text) // _MIB for path in _MEMORY_LIMITS if (text := _read_text(path).strip()).isdigit()]
    return min([total, *limits]) if total else 0


class HostLoadMeter:
    """Load since the previous sample. Not thread-safe."""

    def __init__(self) -> None:
        self._previous = _cpu_ticks()
        self._gpus = Gpus()

    def sample(self) -> HostLoad:
        busy, total = _cpu_ticks()
        busy_delta, total_delta = busy - self._previous[0], total - self._previous[1]
        self._previous = (busy, total)
        return HostLoad(cpu=_percent(busy_delta, total_delta), memory=_memory_load(), gpu=self._gpus.utilization())


class Gpus:
    """NVIDIA devices as NVML reports them; none without NVML."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self.count = 0
        with suppress(Exception):  # no library, no driver, no permission: no GPUs
            self._nvml = import_module("pynvml")
            self._nvml.nvmlInit()
            self.count = int(self._nvml.nvmlDeviceGetCount())

    def utilization(self) -> float:
        """Mean over all devices, in percent."""
        used = 0.0
        with suppress(Exception):  # a driver being updated must not stop the heartbeat
            for index in range(self.count):
                device = self._nvml.nvmlDeviceGetHandleByIndex(index)
                used += self._nvml.nvmlDeviceGetUtilizationRates(device).gpu
        return used / self.count if self.count else 0.0


def _cpu_ticks() -> tuple[int, int]:
    """Busy and total ticks of all CPUs since boot."""
    fields = _read_text("/proc/stat").partition("\n")[0].split()[1:9]
    ticks = [int(field) for field in fields]
    if len(ticks) < 5:
        return 0, 0
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def _memory_load() -> float:
    meminfo = _meminfo()
    total = meminfo.get("MemTotal", 0)
    return _percent(total - meminfo.get("MemAvailable", total), total)


def _meminfo() -> dict[str, int]:
    """In KiB."""
    lines = (line.split() for line in _read_text("/proc/meminfo").splitlines())
    return {fields[0].rstrip(":"): int(fields[1]) for fields in lines if len(fields) > 1}


def _percent(part: int, whole: int) -> float:
    return round(100.0 * part / whole, 1) if whole > 0 else 0.0


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
