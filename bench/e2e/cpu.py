"""CPU time by process tree, from /proc: what a server used, with all that it ever started.

The kernel adds a child's time to its parent when the parent has waited for it, so workers of PostgreSQL that came and
went are in the sum.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Final

TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
PARENT: Final = 1
TIMES: Final = slice(11, 15)
"""Of the process: user and system; of children that have ended and were waited for: the same."""


def used_s(roots: Mapping[str, int]) -> dict[str, float]:
    """Seconds of each tree since it began, by the name its root is given here."""
    spent, children = _processes()
    return {name: _tree_ticks(pid, spent, children) / TICKS_PER_S for name, pid in roots.items()}


def memory_mb(pid: int) -> float:
    """Resident memory of one process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError(f"process {pid} has no memory")


def _tree_ticks(pid: int, spent: Mapping[int, int], children: Mapping[int, list[int]]) -> int:
    return spent.get(pid, 0) + sum(_tree_ticks(child, spent, children) for child in children.get(pid, ()))


def _processes() -> tuple[dict[int, int], dict[int, list[int]]]:
    spent: dict[int, int] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            words = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        pid = int(entry.name)
        spent[pid] = sum(map(int, words[TIMES]))
        children[int(words[PARENT])].append(pid)
    return spent, children
