"""What agents wrote down (`tests.support.run_trace_tasks`), and whether it could have come to be.

T1: after a run that ended well the next begins an interval later at the earliest. T2 and F1: once another run of the
same agent has written anything, a run writes nothing more.
"""

from collections import defaultdict
from itertools import pairwise

from tests.support.agents import history
from tests.support.queue import sql

MAKE = sql("""
CREATE TABLE rota.agent_trail
  (n bigint GENERATED ALWAYS AS IDENTITY, name text, run bigint, acquired_ms bigint, what text)""")
READ = sql("SELECT name, run, acquired_ms, what FROM rota.agent_trail ORDER BY n")


class Trail:
    def __init__(self, database):
        self._database = database

    async def rows(self, name):
        return [row for row in await self._database.rows(READ) if row["name"] == name]

    async def count(self, what, name="beat"):
        return sum(row["what"] == what for row in await self.rows(name))

    async def runs(self, name="beat"):
        return [row["run"] for row in await self.rows(name) if row["what"] == "begin"]

    async def check(self, intervals):
        """`intervals` are those of all agents, in ms."""
        for name, interval_ms in intervals.items():
            rows = await self.rows(name)
            _check_one_after_the_other(name, rows)
            await self._check_not_early(name, rows, interval_ms)

    async def _check_not_early(self, name, rows, interval_ms):
        well = {run["run"] for run in await history(self._database, name) if run["outcome"] == "SUCCEEDED"}
        begun = [(row["run"], row["acquired_ms"]) for row in rows if row["what"] == "begin"]
        for (run, at_ms), (after, after_ms) in pairwise(begun):
            if run in well:
                assert after_ms - at_ms >= interval_ms, f"T1: {name} ran {after} {after_ms - at_ms} ms after {run}"


def _check_one_after_the_other(name, rows):
    places = defaultdict(list)
    for place, row in enumerate(rows):
        places[row["run"]].append(place)
    for run, of_run in places.items():
        assert of_run == list(range(of_run[0], of_run[0] + len(of_run))), f"T2: something came between {name} {run}"
        assert rows[of_run[0]]["what"] == "begin"
        assert [rows[place]["what"] for place in of_run].count("begin") == 1, f"{name} {run} began twice"
