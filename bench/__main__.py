"""Run one benchmark: a table for people, then one line of JSON for programs.

    python -m bench foundations [--quick]
    python -m bench e2e --memory   of `e2e` what takes ten minutes by itself
    python -m bench setup          prepares peers and data beforehand; its time is not counted
    python -m bench e2e --without-peers   if they cannot be installed; figures against them are null
    python -m bench compare REV    this tree against another revision; exit status 1 if it takes over 10 % more CPU time

A benchmark is a module of this package with `run(quick: bool) -> Report`, `setup()` if it needs anything prepared, and
`PEERS` if it compares Rota with any. It is refused at once if one of them is missing, not after minutes of work.
"""

from __future__ import annotations

import argparse
import importlib
import sys

from bench import peers
from bench.report import Report
from rota.infra.telemetry import logs

BENCHES = ("foundations", "accounting", "queue", "e2e", "defaults", "shows", "api", "agents", "policy", "workflow")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench")
    parser.add_argument("name", choices=(*BENCHES, "setup", "compare"))
    parser.add_argument("revision", nargs="?", help="compare: the revision to compare this tree with")
    parser.add_argument("--laps", type=int, default=0, help="compare: pairs of laps (default: 5, quick: 2)")
    parser.add_argument("--quick", action="store_true", help="fewer repeats; figures are rougher")
    parser.add_argument("--memory", action="store_true", help="e2e: memory of the server over ten minutes, alone")
    parser.add_argument("--without-peers", action="store_true", help="run although peers are missing")
    chosen = parser.parse_args()
    logs.configure("console", "warning")
    if chosen.name == "setup":
        return _set_up()
    if (chosen.name == "compare") != (chosen.revision is not None):
        parser.error("`compare` needs a revision, such as HEAD~10; other benchmarks take none.")
    wanted = {"memory": True} if chosen.memory else {}
    if chosen.name == "compare":
        wanted = {"revision": chosen.revision, "laps": chosen.laps}
    bench = importlib.import_module(f"bench.{chosen.name}")
    if not (chosen.without_peers or chosen.memory) and (missing := peers.missing(getattr(bench, "PEERS", ()))):
        print(f"`bench {chosen.name}` compares Rota with peers that are missing: {missing}", file=sys.stderr)
        return 2
    report: Report = bench.run(chosen.quick, **wanted)
    report.print(chosen.name)
    return 0 if report.within_bars else 1


def _set_up() -> int:
    for name in BENCHES:
        prepare = getattr(importlib.import_module(f"bench.{name}"), "setup", None)
        if prepare:
            prepare()
        print(f"{name}: {'set up' if prepare else 'needs nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
