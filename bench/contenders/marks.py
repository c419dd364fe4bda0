"""When each entry ran: a shared file with a moment per entry, written from the bodies in whatever process they run.

It is read while it is written. A moment is one aligned word, so it is there or it is not. The last word counts entries
that ran again; two processes that count at the same time may count one too few.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

MARKS = "BENCH_MARKS"
"""In the environment: the file."""
WORD = 8


class Marks:
    """Moments in nanoseconds since 1970, by the number of the entry; 0 is none yet."""

    def __init__(self, path: str | Path) -> None:
        with open(path, "r+b") as file:  # noqa: PTH123  it is opened in the first body that runs
            self._words = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
        self._unmarked = 0

    @classmethod
    def make(cls, path: str | Path, n: int) -> Marks:
        Path(path).write_bytes(bytes(WORD * (n + 1)))
        return cls(path)

    @property
    def repeated(self) -> int:
        """Entries that ran again."""
        return self._words[-1]

    def mark(self, number: int) -> None:
        if self._words[number]:
            self._words[-1] += 1
        self._words[number] = time.time_ns()

    def read(self) -> list[int]:
        return self._words[:-1].tolist()

    def first_unmarked(self) -> int:
        """The lowest number without a moment, or the number of entries. Cheap to ask often: it resumes where it was."""
        end = len(self._words) - 1
        while self._unmarked < end and self._words[self._unmarked]:
            self._unmarked += 1
        return self._unmarked


_of_process: list[Marks] = []


def mark(number: int) -> None:
    """In the file that the environment names."""
    if not _of_process:
        _of_process.append(Marks(os.environ[MARKS]))
    _of_process[0].mark(number)
