"""Test durations: the slowest tests, the time by folder, and a limit for a single test.

A test that takes longer than `LIMIT_S` fails the run unless it is marked `@pytest.mark.slow("why")` or soak. The
limit grows with the load of the machine.
"""

import os
from collections import Counter
from pathlib import Path

from tests.support.harness.effort import FULL

LIMIT_S = 15.0
SHOWN = 40
SHOWN_FROM = 500
"""Smaller runs print no table; use `--durations` there."""


def slowdown(average=0):
    """How many times longer work takes because the machine is busy, by one of its three load averages."""
    return max(1.0, os.getloadavg()[average] / (os.cpu_count() or 1))


class Durations:
    def __init__(self):
        self._seconds = Counter()
        self._tests = Counter()
        self._marked = set()
        self.too_slow = []

    def pytest_runtest_logreport(self, report):
        self._seconds[report.nodeid] += report.duration
        if report.when == "call":
            self._tests[_folder(report.nodeid)] += 1
        if "slow" in report.keywords or "soak" in report.keywords:
            self._marked.add(report.nodeid)

    def pytest_sessionfinish(self, session, exitstatus):
        limit_s = LIMIT_S * slowdown(1)
        slow = [(seconds, test) for test, seconds in self._seconds.items() if seconds > limit_s and not FULL]
        self.too_slow = sorted((item for item in slow if item[1] not in self._marked), reverse=True)
        if self.too_slow and exitstatus == 0:
            session.exitstatus = 1

    def pytest_terminal_summary(self, terminalreporter):
        if len(self._seconds) >= SHOWN_FROM:
            self._show(terminalreporter)
        for seconds, test in self.too_slow:
            terminalreporter.write_line(
                f"{test} took {seconds:.1f} s: make it quicker than {LIMIT_S:g} s, or mark it"
                ' @pytest.mark.slow("why") if it cannot be',
                red=True,
            )

    def _show(self, terminal):
        terminal.section(f"the {SHOWN} slowest tests")
        for test, seconds in self._seconds.most_common(SHOWN):
            terminal.write_line(f"{seconds:7.2f} s  {test}")
        terminal.section("time by folder, all processes together")
        folders = Counter()
        for test, seconds in self._seconds.items():
            folders[_folder(test)] += seconds
        for folder, seconds in folders.most_common():
            terminal.write_line(f"{seconds:7.1f} s  {self._tests[folder]:5} tests  {folder}")


def _folder(nodeid):
    return str(Path(nodeid.partition("::")[0]).parent)
