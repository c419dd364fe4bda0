"""The traces of agent runs (`tests.support.run_trace_tasks`) and the check of their invariants.

T1: after a successful run, the next starts an interval later at the earliest. T2 and F1: a run writes nothing after
another run of the same agent has written.
"""

from collections import defaultdict
from itertools import pairwise

from tests.support.agents import history
from tests.support.queue import sql

MAKE = sql("""
CREATE TABLE rota.agent_trail
  (n bigint GENERATED ALWAYS AS IDENTITY, name text, run bigint, acquired_ms bigint, what text)""")
READ = sql("SELECT name, run, acquired_ms, what FROM rota.agent_trail ORDER BY n")


class RunTrace:
    def __init__(self, database):
        self._database = database

    async def rows(self, name):
        return [row for row in await self._database.rows(READ) if row["name"] == name]

    async def count(self, what, name="beat"):
        return sum(row["what"] == what for row in await self.rows(name))

    async def runs(self, name="beat"):
        return [row["run"] for row in await self.rows(name) if row["what"] == "begin"]

    async def check(self, intervals):
        """`intervals` maps agents to their intervals in ms."""
        for name, interval_ms in intervals.items():
            rows = await self.rows(name)
            _check_no_overlap(name, rows)
            await self._check_not_early(name, rows, interval_ms)

    async def _check_not_early(self, name, rows, interval_ms):
        succeeded = {run["run"] for run in await history(self._database, name) if run["outcome"] == "SUCCEEDED"}
        begun = [(row["run"], row["acquired_ms"]) for row in rows if row["what"] == "begin"]
        for (run, at_ms), (after, after_ms) in pairwise(begun):
            if run in succeeded:
                assert after_ms - at_ms >= interval_ms, (
                    f"T1: run {after} of {name} started {after_ms - at_ms} ms after run {run}"
                )


def _check_no_overlap(name, rows):
    positions = defaultdict(list)
    for position, row in enumerate(rows):
        positions[row["run"]].append(position)
    for run, of_run in positions.items():
        assert of_run == list(range(of_run[0], of_run[0] + len(of_run))), (
            f"T2: another run wrote during run {run} of {name}"
        )
        assert rows[of_run[0]]["what"] == "begin"
        assert [rows[position]["what"] for position in of_run].count("begin") == 1, f"run {run} of {name} started twice"
