"""This tree against another revision: CPU time per frame and per job. See README.md beside this file.

A lap is a process of its own on new servers, with the sources of its revision and the packages of this environment.
Laps of both alternate and change places, so that a noisy minute or a warm cache serves neither; the ratio is taken pair
by pair.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.report import Figure, Report

WORSE_MAX: Final = 1.10
"""More CPU time than this many times the other revision's fails."""
HERE: Final = Path(__file__).resolve().parents[1]
LAP: Final = Path("bench/e2e/lap.py")
SIZES: Final = {"frame": ("frames", 50_000), "job": ("jobs", 10_000)}
LAP_TIMEOUT_S: Final = 300.0


@dataclass(slots=True)
class Laps:
    """Samples of both revisions, pair by pair."""

    cpu_us: dict[str, list[float]] = field(default_factory=lambda: {"this": [], "other": []})
    per_s: dict[str, list[float]] = field(default_factory=lambda: {"this": [], "other": []})

    def figures(self, what: str, revision: str) -> Iterator[Figure]:
        ratios = [this / other for this, other in zip(self.cpu_us["this"], self.cpu_us["other"], strict=True)]
        yield Figure(f"cpu_per_{what}_vs_other", ratios, bar=WORSE_MAX, note=f"this tree / {revision}, pair by pair")
        yield Figure(f"cpu_us_per_{what}", self.cpu_us["this"], note="all processes, this tree")
        yield Figure(f"cpu_us_per_{what}_other", self.cpu_us["other"], note=f"the same at {revision}")
        yield Figure(f"{what}s_per_s", self.per_s["this"], note="this tree")
        yield Figure(f"{what}s_per_s_other", self.per_s["other"], note=revision)


def run(quick: bool, revision: str, laps: int = 0) -> Report:
    laps = laps or (2 if quick else 5)
    found = {what: Laps() for what in SIZES}
    with _checkout(revision) as other:
        trees = {"this": HERE, "other": other}
        for number in range(laps):
            for what, (kind, n) in SIZES.items():
                for name in sorted(trees, reverse=number % 2 == 0):
                    figures = _lap(trees[name], kind, n)
                    found[what].cpu_us[name].append(figures["cpu_us"])
                    found[what].per_s[name].append(figures["per_s"])
    return Report([figure for what in SIZES for figure in found[what].figures(what, revision)])


@contextmanager
def _checkout(revision: str) -> Iterator[Path]:
    """The files of a revision in a folder of their own, which can run a lap even if it is older than this bench."""
    with tempfile.TemporaryDirectory(prefix="rota-compare-") as name:
        folder = Path(name)
        archive = subprocess.run(
            ["git", "-C", str(HERE), "archive", "--format=tar", revision], check=False, capture_output=True
        )
        if archive.returncode:
            raise SystemExit(f"There is no revision {revision!r} here: {archive.stderr.decode().strip()}")
        subprocess.run(["tar", "-x", "-C", name], input=archive.stdout, check=True)
        if not (folder / LAP).exists():
            shutil.copy(HERE / LAP, folder / LAP)
        yield folder


def _lap(tree: Path, kind: str, n: int) -> dict[str, float]:
    env = {**os.environ, "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}"}
    done = subprocess.run(
        [sys.executable, "-m", "bench.e2e.lap", kind, str(n)],
        check=False,
        cwd=tree,
        env=env,
        capture_output=True,
        text=True,
        timeout=LAP_TIMEOUT_S,
    )
    if done.returncode:
        raise SystemExit(f"A lap of {kind} in {tree} failed:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))
