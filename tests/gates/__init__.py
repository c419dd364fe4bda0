"""The gates of `make check`: `python -m tests.gates [NAME ... | all]`. One line each; a failed gate lists its problems.

Two run at a time, the slowest first. The exit status is 1 if any failed, 2 if a gate is not known.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tests.gates import constructors, names, tree
from tests.gates.tree import Report

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
TIMEOUT_S = 300


def command(*words: str) -> Callable[[Path], Report]:
    """A gate that runs a program of the virtualenv and fails if it does."""

    def run(root: Path) -> Report:
        try:
            ended = subprocess.run(
                [str(BIN / words[0]), *words[1:]],
                cwd=root,
                capture_output=True,
                check=False,
                text=True,
                timeout=TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return Report([f"{words[0]} could not run: {error}; `make setup` installs it"])
        shown = (ended.stdout + ended.stderr).strip()
        return Report((shown or f"exit status {ended.returncode}").splitlines()) if ended.returncode else Report()

    return run


NOT_ABOUT_LOCKS = (
    "prefer-bigint-over-int",
    "prefer-bigint-over-smallint",
    "prefer-robust-stmts",  # the migrator records what ran, in the same transaction
    "require-lock-timeout",  # the migrator sets both
    "require-statement-timeout",
)


def ddl_locks(root: Path) -> Report:
    """DDL that would block a running service. Baselines are left out: they only create tables."""
    found = [path for path in tree.files(root) if path.parent.name == "migrations" and path.suffix == ".sql"]
    later = [str(path.relative_to(root)) for path in found if not path.stem.endswith("_baseline")]
    if not later:
        return Report([], "there are only baselines")
    return command("squawk", "--pg-version", "14", "--exclude", ",".join(NOT_ABOUT_LOCKS), *later)(root)


GATES: dict[str, Callable[[Path], Report]] = {
    "types": command("mypy", "--no-error-summary"),
    "collects": command("pytest", "--collect-only", "-q", "-n0"),
    "layers": command("lint-imports", "--no-logo"),
    "lint": command("ruff", "check", "--quiet", "--output-format", "concise", "."),
    "format": command("ruff", "format", "--quiet", "--check", "--output-format", "concise", "."),
    "sizes": tree.sizes,
    "unfinished": tree.unfinished,
    "locks": tree.locks,
    "places": tree.places,
    "secrets": tree.secrets,
    "migrations": tree.migrations,
    "DDL locks": ddl_locks,
    "folders": names.folders,
    "class names": names.class_names,
    "vague names": names.vague_names,
    "SQL files": names.sql_files,
    "SQL writes": names.sql_writes,
    "phrases": names.phrases,
    "constructors": constructors.constructors,
    "callbacks": constructors.callbacks,
}

FOR_TESTS = ("collects",)
"""Only for `make test`: finds import errors and compiles the tests once for all test processes."""


def timed(gate: Callable[[Path], Report], root: Path) -> tuple[Report, float]:
    began = time.perf_counter()
    try:
        report = gate(root)
    except Exception as error:  # noqa: BLE001 - a gate that crashes fails
        report = Report([f"the gate itself failed: {type(error).__name__}: {error}"])
    return report, time.perf_counter() - began


def shown(name: str, report: Report, seconds: float) -> str:
    status = "FAIL" if report.problems else "ok"
    head = f"{status:<5} {name:<12} {seconds:6.2f} s  {report.note}".rstrip()
    return "\n".join([head, *(f"      {problem}" for problem in report.problems)])


def main(names: list[str], root: Path = ROOT, gates: dict[str, Callable[[Path], Report]] = GATES) -> int:
    names = list(gates) if names == ["all"] else names or [name for name in gates if name not in FOR_TESTS]
    if unknown := [name for name in names if name not in gates]:
        print(f"No gate {', '.join(unknown)}; there are {', '.join(gates)}.")
        return 2
    began = time.perf_counter()
    failed = 0
    with ThreadPoolExecutor(max_workers=2) as pool:
        running = {pool.submit(timed, gates[name], root): name for name in names}
        for ended in as_completed(running):
            report, seconds = ended.result()
            failed += bool(report.problems)
            print(shown(running[ended], report, seconds), flush=True)
    print(f"{len(running)} gates, {failed or 'none'} failed, {time.perf_counter() - began:.1f} s")
    return 1 if failed else 0
