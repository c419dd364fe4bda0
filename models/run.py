"""Check the models of the books with Spin and compare each verdict with the one we expect.

    python models/run.py                 every run, one table; exit code 1 if any verdict differs
    python models/run.py --quick         the small ones (seconds)
    python models/run.py NAME …          these alone
    python models/run.py --trace NAME    the shortest way into the violation, step by step

A run that must hold is a proof, within its bounds, only because the search was complete. "none found" is a sample
(bit-state hashing, cut after a minute) and proves nothing. A run that must break shows that the model sees what the
missing rule prevents.
Without spin or a C compiler there is one notice and exit code 0.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import PIPE, STDOUT

HERE = Path(__file__).resolve().parent
MEMORY_MB = 2000
DEPTH_MAX = 100_000
RUN_TIMEOUT_S = 300
SAMPLE_MINUTES = 1
AT_ONCE = min(2, os.cpu_count() or 1)  # each may take MEMORY_MB


@dataclass(frozen=True)
class Run:
    """One configuration of a model, what must come of it, and whether it is small enough for `--quick`."""

    name: str
    flags: str
    expected: str = "holds"
    model: str = "books.pml"
    quick: bool = False
    sampled: bool = False


@dataclass(frozen=True)
class Outcome:
    """What came of a run: `holds`, `breaks A2`, `none found`, or a word that is never expected."""

    verdict: str
    states: int
    seconds: float
    trace: str = ""


def holds(name: str, flags: str = "", *, model: str = "books.pml", quick: bool = False) -> Run:
    return Run(name, flags, model=model, quick=quick)


def sampled(name: str, flags: str) -> Run:
    return Run(name, flags, "none found", sampled=True)


def breaks(name: str, flags: str, *, model: str = "books.pml", quick: bool = False) -> Run:
    return Run(name, flags, "breaks", model, quick)


RAISED_AND_LOWERED = "-DCAP_RAISED_AND_LOWERED -DSUB_CAP=1"
TWO_LOWERED = "-DTWO_CAPS_LOWERED -DJOB_CAP=2"
TWINS = "-DTWINS=1 -DBOOKERS=1 -DRAISES=1"
TWINS_CAP = "-DTWINS=1 -DBOOKERS=2 -DCAP_LOWERED -DJOB_CAP=2"
REMOVED = "-DREMOVED -DRECOUNTERS=0"

BOOKS = (
    holds("plain", quick=True),
    holds("plain, subscription binds", "-DSUB_CAP=1 -DJOB_CAP=2"),
    holds("crash", "-DCRASH", quick=True),
    holds("retry, each call twice", "-DRETRY -DREPEAT", quick=True),
    holds("late copies of calls", "-DLATE"),
    holds("counters adrift", "-DDRIFT"),
    holds("flush, 2 bookers", "-DFLUSHES=1 -DBOOKERS=2", quick=True),
    holds("flush", "-DFLUSHES=1 -DRELEASES=1"),
    holds("flush during bootstrap", "-DFLUSHES=2 -DBOOTSTRAPS=1 -DBOOKERS=2"),
    holds("two bootstraps", "-DFLUSHES=1 -DBOOTSTRAPS=2 -DRELEASES=1 -DRECOUNTERS=0"),
    holds("two bootstraps, recount", "-DFLUSHES=1 -DBOOTSTRAPS=2 -DBOOKERS=1 -DRELEASES=1"),
    holds("two flushes, two bootstraps", "-DFLUSHES=2 -DBOOTSTRAPS=2 -DBOOKERS=2 -DRECOUNTERS=0"),
    holds("cap lowered", "-DCAP_LOWERED"),
    holds("cap lowered, tried again", "-DCAP_LOWERED -DRETRY -DREBOOK"),
    holds("cap raised and lowered", RAISED_AND_LOWERED),
    holds("two caps lowered", f"{TWO_LOWERED} -DRELEASES=1"),
    holds("cap lowered, flush", "-DCAP_LOWERED -DFLUSHES=1 -DBOOKERS=2 -DRELEASES=1"),
    holds("two caps lowered, flush", f"{TWO_LOWERED} -DFLUSHES=1 -DBOOKERS=2 -DRECOUNTERS=0"),
    holds("two recounters, 2 bookers", "-DRECOUNTERS=2 -DBOOKERS=2"),
    holds("two recounters", "-DRECOUNTERS=2 -DRELEASES=1"),
    holds("two recounters, crash, retry", "-DRECOUNTERS=2 -DCRASH -DRETRY -DBOOKERS=2"),
    holds("crash, flush, retry", "-DCRASH -DRETRY -DFLUSHES=1 -DBOOKERS=2"),
    holds("faults, two bootstraps", "-DCRASH -DRETRY -DFLUSHES=1 -DBOOTSTRAPS=2 -DBOOKERS=2 -DRECOUNTERS=0"),
    holds("faults, cap", "-DCRASH -DRETRY -DREBOOK -DCAP_LOWERED -DBOOKERS=2 -DJOB_CAP=2"),
    holds("insert sent twice", "-DRESEND"),
    holds("twins", TWINS, quick=True),
    holds("three of one token", "-DTWINS=2 -DBOOKERS=1 -DRAISES=1"),
    holds("twins, crash, insert sent twice", f"{TWINS} -DCRASH -DRESEND"),
    holds("twins, token booked again", f"{TWINS} -DREBOOK -DLATE"),
    holds("twins, cap", TWINS_CAP),
    holds("twins, flush", "-DTWINS=1 -DBOOKERS=2 -DFLUSHES=1"),
    holds("twins, flush, fence raised", f"{TWINS} -DFLUSHES=1"),
    holds("twins, release asks for equality", f"{TWINS_CAP} -DEXACT_FENCE"),
    holds("twins, release asks the token", f"{TWINS_CAP} -DSTAMPED"),
    holds("twins, flush, it asks the token", "-DTWINS=1 -DBOOKERS=2 -DFLUSHES=1 -DRECOUNTERS=0 -DSTAMPED"),
    holds("older Redis, run id compared", "-DRESTORE -DRUN_ID -DBOOKERS=2 -DBOOTSTRAPS=1"),
    sampled("all at once", "-DCRASH -DRETRY -DTWINS=1 -DFLUSHES=2 -DBOOTSTRAPS=2 -DRECOUNTERS=2 -DCAP_LOWERED"),
    breaks("no grave check", "-DBUG_NO_GRAVE_CHECK", quick=True),
    breaks("no fence check", "-DBUG_NO_FENCE_CHECK -DFLUSHES=1 -DBOOKERS=2", quick=True),
    breaks("insert without the lock", "-DBUG_INSERT_UNLOCKED"),
    breaks("grave without the lock", "-DBUG_GRAVE_UNLOCKED"),
    breaks("suspects go without grave", "-DBUG_REMOVED_WITHOUT_GRAVE"),
    breaks("fence first in bootstrap", "-DBUG_FENCE_FIRST -DFLUSHES=1 -DBOOKERS=2"),
    breaks("shadow not adjusted", "-DBUG_SHADOW_NOT_ADJUSTED"),
    breaks("mark not honoured", "-DBUG_MARK_NOT_HONOURED"),
    breaks("swapped before the last bucket", "-DBUG_SWAPPED_EARLY"),
    breaks("cap lowered, fence not raised", "-DBUG_LOWERED_WITHOUT_FENCE -DCAP_LOWERED"),
    breaks("push without version", f"-DBUG_PUSH_WITHOUT_VERSION {RAISED_AND_LOWERED}"),
    breaks("one level checked", "-DBUG_ONE_LEVEL_CHECKED"),
    breaks("book not repeatable", "-DBUG_BOOK_NOT_REPEATABLE -DREPEAT"),
    breaks("release not repeatable", "-DBUG_RELEASE_NOT_REPEATABLE -DREPEAT"),
    breaks("mark not compared", "-DBUG_MARK_NOT_COMPARED -DRECOUNTERS=2 -DBOOKERS=2"),
    breaks("swap not compared", "-DBUG_SWAP_NOT_COMPARED -DRECOUNTERS=2 -DBOOKERS=2"),
    breaks("mark stops at the last bucket", "-DBUG_END_NOT_MARKED"),
    breaks("no seeding mark", "-DBUG_NO_SEEDING_MARK -DFLUSHES=2 -DBOOTSTRAPS=1 -DBOOKERS=2 -DRECOUNTERS=0"),
    breaks("push seeds an empty Redis", "-DBUG_PUSH_SEEDS -DCAP_LOWERED -DFLUSHES=1 -DBOOKERS=2 -DRECOUNTERS=0"),
    breaks("push skips a fence", f"-DBUG_PUSH_SKIPS {TWO_LOWERED}"),
    breaks("unknown taken for refused", "-DBUG_UNKNOWN_IS_REFUSED"),
    breaks("no grave on delete", f"-DBUG_NO_GRAVE {TWINS}", quick=True),
    breaks("insert sent twice, no grave", "-DBUG_NO_GRAVE -DRESEND"),
    breaks("grave pruned too soon", f"-DBUG_PRUNED_EARLY {TWINS}"),
    breaks("grave of an old fence bars", f"-DBUG_OLD_GRAVE_BARS {TWINS}", quick=True),
    breaks("release not fenced", f"-DBUG_RELEASE_NOT_FENCED {TWINS}", quick=True),
    breaks("a row there is refused", f"-DBUG_THERE_IS_REFUSED {TWINS}"),
    breaks("a token there is booked", "-DBUG_THERE_IS_BOOKED -DCAP_LOWERED -DREBOOK -DRECOUNTERS=0", quick=True),
    breaks("older Redis, nothing compared", "-DRESTORE -DBOOKERS=2 -DRECOUNTERS=0"),
)
LIMITS = (
    holds("first cap of a job", "-DFIRST_CAP", model="limits.pml", quick=True),
    holds("first cap, reseed", "-DFIRST_CAP -DRESEEDERS=1", model="limits.pml"),
    holds("first cap, two recounters", "-DFIRST_CAP -DRESEEDERS=1 -DRECOUNTERS=2 -DRELEASES=0", model="limits.pml"),
    holds("first cap, another lowered", "-DFIRST_CAP -DLOWERED -DRESEEDERS=1 -DRELEASES=0", model="limits.pml"),
    holds("first cap and removal", "-DFIRST_CAP -DLOWERED -DREMOVED", model="limits.pml"),
    holds("cap lowered, another taught", "-DLOWERED -DTEACHERS=1 -DTAUGHT=JOB -DRESEEDERS=1", model="limits.pml"),
    holds("share removed, taught late", "-DREMOVED -DTEACHERS=1 -DRESEEDERS=1", model="limits.pml"),
    holds("share removed, two reseeds", f"{REMOVED} -DTEACHERS=1 -DRESEEDERS=2", model="limits.pml"),
    holds("two reseeds without names", f"{REMOVED} -DTEACHERS=1 -DRESEEDERS=2 -DNAMELESS", model="limits.pml"),
    breaks("fence moves while uncounted", "-DBUG_FENCE_MOVES_UNCOUNTED -DFIRST_CAP", model="limits.pml", quick=True),
    breaks(
        "flag cleared by an older recount",
        "-DBUG_FLAG_CLEARED_BLINDLY -DFIRST_CAP -DRESEEDERS=1",
        model="limits.pml",
    ),
    breaks(
        "a recount ends another's",
        "-DBUG_RECOUNT_NOT_NAMED -DFIRST_CAP -DRESEEDERS=1 -DRECOUNTERS=2",
        model="limits.pml",
        quick=True,
    ),
    breaks(
        "any push moves the fence",
        "-DBUG_ANY_PUSH_MOVES_THE_FENCE -DLOWERED -DTEACHERS=1 -DTAUGHT=JOB",
        model="limits.pml",
        quick=True,
    ),
    breaks(
        "removed before the fence",
        f"-DBUG_REMOVED_BEFORE_THE_FENCE {REMOVED} -DTEACHERS=1 -DRESEEDERS=1",
        model="limits.pml",
    ),
    breaks(
        "removed before it, no names",
        f"-DBUG_REMOVED_BEFORE_THE_FENCE {REMOVED} -DRESEEDERS=2 -DNAMELESS",
        model="limits.pml",
    ),
)
HANDS = (
    holds("given back", "-DFLIPS=1", model="hands.pml", quick=True),
    holds("given back and taken again", "-DFLIPS=2 -DRELEASES=0", model="hands.pml"),
    holds("flips nobody looks after", "-DFLIPS=2 -DLOOKS=0", model="hands.pml"),
    holds("flips and a flush", "-DFLIPS=2 -DFLUSHES=1 -DRELEASES=0 -DLOOKS=0", model="hands.pml"),
    holds("two replicas, two flushes", "-DFLUSHES=2 -DLOOKS=2", model="hands.pml"),
    holds("two replicas, cap, flush", "-DFLUSHES=1 -DLOOKS=2 -DRAISES=1 -DRELEASES=0", model="hands.pml"),
    breaks("reseed lifts over a flip", "-DBUG_LIFTED_OVER_A_FOUNDING -DFLIPS=2", model="hands.pml", quick=True),
    breaks(
        "reseed lifts over a seeding",
        "-DBUG_LIFTED_OVER_A_FOUNDING -DFLUSHES=2 -DLOOKS=2 -DRELEASES=0",
        model="hands.pml",
    ),
    breaks("wiped without mark", "-DBUG_WIPED_WITHOUT_MARK -DFLIPS=2", model="hands.pml"),
    breaks("flip without fence", "-DBUG_FLIP_WITHOUT_FENCE -DFLIPS=2", model="hands.pml"),
)
RUNS = (*BOOKS, *LIMITS, *HANDS, breaks("sequence number only", "", model="sequence.pml", quick=True))


def small(run: Run) -> bool:
    return run.quick or run.expected == "breaks"


def tool(command: list[str], folder: Path) -> str:
    """Run one of the tools; its own words end this program if it fails."""
    done = subprocess.run(
        command, cwd=folder, stdout=PIPE, stderr=STDOUT, text=True, timeout=RUN_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{command[0]} failed:\n{done.stdout}")
    return done.stdout


def model(run: Run, *, trace: bool) -> list[str]:
    # A breadth-first search cannot have hidden variables: the scratch ones become part of the state.
    return [*(["-Dhidden="] if trace else []), *run.flags.split(), str(HERE / run.model)]


def build(run: Run, folder: Path, *, trace: bool) -> None:
    tool(["spin", "-a", *model(run, trace=trace)], folder)
    storage = "-DBITSTATE" if run.sampled else "-DBFS" if trace else "-DCOLLAPSE"
    # Optimising takes longer than a small search.
    effort = "-O0" if small(run) else "-O1"
    tool(["cc", effort, "-w", "-DSAFETY", f"-DMEMLIM={MEMORY_MB}", storage, "-o", "pan", "pan.c"], folder)


def search(run: Run, folder: Path) -> str:
    """What the checker prints; nothing if it had to be stopped."""
    sample = ["-w32", f"-Q{SAMPLE_MINUTES}"] if run.sampled else []
    table = ["-w20"] if small(run) else []
    command = ["./pan", f"-m{DEPTH_MAX}", *sample, *table]
    try:
        done = subprocess.run(command, cwd=folder, stdout=PIPE, text=True, timeout=RUN_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout


def verdict(run: Run, output: str) -> str:
    """The word for what the checker printed; a search that was cut short never counts as `holds`."""
    violated = re.search(r"assertion violated \(?(\w+)", output)
    if violated:
        return f"breaks {violated[1]}"
    if "invalid end state" in output.replace("invalid end states", ""):
        return "stuck"
    if run.sampled:
        return "none found" if "errors: 0" in output else "unfinished"
    complete = "errors: 0" in output and "not completed" not in output and "too small" not in output
    return "holds" if complete else "unfinished"


def states(output: str) -> int:
    found = re.search(r"([\d.e+]+) states, stored", output)
    return int(float(found[1])) if found else 0


def check(run: Run, *, trace: bool = False) -> Outcome:
    """Build the checker of `run` in a directory of its own and run it."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rota-models-") as name:
        folder = Path(name)
        build(run, folder, trace=trace)
        output = search(run, folder)
        story = replay(run, folder) if trace else ""
    return Outcome(verdict(run, output), states(output), time.monotonic() - began, story)


def replay(run: Run, folder: Path) -> str:
    """The steps into the violation, as the model tells them."""
    trail = next(folder.glob("*.trail"), None)
    if trail is None:
        return "no violation, no trace"
    command = ["spin", "-k", trail.name, *model(run, trace=True)]
    done = subprocess.run(command, cwd=folder, stdout=PIPE, text=True, timeout=RUN_TIMEOUT_S, check=False)
    return "\n".join(re.findall(r"^ +(\d+: [a-zA-Z].*)$", done.stdout, re.MULTILINE))


def as_expected(run: Run, outcome: Outcome) -> bool:
    return outcome.verdict.startswith(run.expected)


def line(run: Run, outcome: Outcome) -> str:
    note = "" if as_expected(run, outcome) else "  <- not as expected"
    return (
        f"{run.name:<32} {run.expected:<10} {outcome.verdict:<10} {outcome.states:>12,} {outcome.seconds:>7.1f}{note}"
    )


def chosen(names: list[str], *, quick: bool) -> list[Run]:
    unknown = set(names) - {run.name for run in RUNS}
    if unknown:
        sys.exit(f"no such run: {', '.join(sorted(unknown))}; names are in the table of a full run")
    return [run for run in RUNS if (run.name in names if names else run.quick or not quick)]


def missing_tools() -> list[str]:
    return [tool for tool in ("spin", "cc") if shutil.which(tool) is None]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check the models of the books.")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="only the runs that take seconds together")
    parser.add_argument("--trace", action="store_true", help="print the shortest way into each violation")
    options = parser.parse_args(arguments)
    if absent := missing_tools():
        print(f"models not checked: {' and '.join(absent)} not found; install spin and a C compiler to run them")
        return 0
    print(f"{'name':<32} {'expected':<10} {'got':<10} {'states':>12} {'seconds':>7}")
    runs = chosen(options.names, quick=options.quick)
    wrong = 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for run, outcome in zip(runs, pool.map(partial(check, trace=options.trace), runs), strict=True):
            print(line(run, outcome), outcome.trace, sep="\n" if outcome.trace else "", flush=True)
            wrong += not as_expected(run, outcome)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
