"""Figures of one run: medians with their spread, beside the bar they must meet."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure: the median of `samples`, or null when it could not be measured at its size."""

    name: str
    samples: Sequence[float]
    bar: float | None = None
    higher_is_better: bool = False
    note: str = ""

    @property
    def value(self) -> float | None:
        return statistics.median(self.samples) if self.samples else None

    @property
    def within_bar(self) -> bool:
        if self.bar is None:
            return True
        if self.value is None:
            return False
        return self.value >= self.bar if self.higher_is_better else self.value <= self.bar

    def row(self) -> tuple[str, ...]:
        if self.value is None:
            return (self.name, "null", "", "", "NO" if self.bar is not None else "", self.note)
        spread = f"{shown(min(self.samples))} to {shown(max(self.samples))} (n={len(self.samples)})"
        bar = "" if self.bar is None else f"{'≥' if self.higher_is_better else '≤'} {self.bar:g}"
        return (
            self.name,
            shown(self.value),
            spread,
            bar,
            "" if not bar else "yes" if self.within_bar else "NO",
            self.note,
        )


@dataclass(slots=True)
class Report:
    figures: list[Figure] = field(default_factory=list)

    def add(self, figure: Figure) -> None:
        self.figures.append(figure)

    @property
    def within_bars(self) -> bool:
        return all(figure.within_bar for figure in self.figures)

    def print(self, name: str) -> None:
        columns = ("figure", "median", "spread", "bar", "met", "what")
        rows = [columns, *(figure.row() for figure in self.figures)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
        print(f"{name} on {machine()}")
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        figures = {figure.name: None if figure.value is None else round(figure.value, 4) for figure in self.figures}
        print(json.dumps({"bench": name, "figures": figures}))


def shown(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def machine() -> str:
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, load {load:.1f}"
