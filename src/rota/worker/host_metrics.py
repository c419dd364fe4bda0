"""What this machine has and how busy it is, read from the kernel; GPUs from NVML when that is installed.

Inside a container the limits of its control group are what counts. What cannot be read is 0, never an error.
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
    """Processors that this process may use, in hundredths."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 100 * here


def memory_mb() -> int:
    total = _meminfo().get("MemTotal", 0) // 1024
    limits = [int(text) // _MIB for path in _MEMORY_LIMITS if (text := _read_text(path).strip()).isdigit()]
    return min([total, *limits]) if total else 0


class HostLoadMeter:
    """Load between one look and the next. For one thread."""

    def __init__(self) -> None:
        self._before = _cpu_ticks()
        self._gpus = Gpus()

    def sample(self) -> HostLoad:
        busy, total = _cpu_ticks()
        spent, passed = busy - self._before[0], total - self._before[1]
        self._before = (busy, total)
        return HostLoad(cpu=_percent(spent, passed), memory=_memory_load(), gpu=self._gpus.utilization())


class Gpus:
    """NVIDIA's devices as NVML shows them; none without it."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self.count = 0
        with suppress(Exception):  # no library, no driver, no rights: all mean that none is found
            self._nvml = import_module("pynvml")
            self._nvml.nvmlInit()
            self.count = int(self._nvml.nvmlDeviceGetCount())

    def utilization(self) -> float:
        """The mean over all devices, in percent."""
        used = 0.0
        with suppress(Exception):  # a driver that is being updated must not end the pulse
            for place in range(self.count):
                device = self._nvml.nvmlDeviceGetHandleByIndex(place)
                used += self._nvml.nvmlDeviceGetUtilizationRates(device).gpu
        return used / self.count if self.count else 0.0


def _cpu_ticks() -> tuple[int, int]:
    """Of all processors since the start: busy ones and all of them."""
    words = _read_text("/proc/stat").partition("\n")[0].split()[1:9]
    ticks = [int(word) for word in words]
    if len(ticks) < 5:
        return 0, 0
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def _memory_load() -> float:
    found = _meminfo()
    total = found.get("MemTotal", 0)
    return _percent(total - found.get("MemAvailable", total), total)


def _meminfo() -> dict[str, int]:
    """In KiB."""
    lines = (line.split() for line in _read_text("/proc/meminfo").splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1}


def _percent(part: int, whole: int) -> float:
    return round(100.0 * part / whole, 1) if whole > 0 else 0.0


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
