"""Closes days, `nightly.py DAY...`: one transaction closes a day and submits its load.

Either both take effect or neither, even after a crash, and no day is loaded twice. The announcement waits for these
jobs.
"""

from __future__ import annotations

import sys

import psycopg
from tasks import announce, load

from rota import database_url

TABLE = "CREATE TABLE IF NOT EXISTS closed_day (day text PRIMARY KEY, job uuid)"


def close(connection: psycopg.Connection, day: str) -> list[object]:
    """The job that loads the day; empty if it was submitted before."""
    with connection.transaction():
        made = connection.execute("INSERT INTO closed_day (day) VALUES (%s) ON CONFLICT DO NOTHING", [day])
        if not made.rowcount:
            return []
        job = load.options(priority="BATCH", deadline="1h").sync.on(connection).submit(day)
        connection.execute("UPDATE closed_day SET job = %s WHERE day = %s", [job.id, day])
        return [job]


if __name__ == "__main__":
    with psycopg.connect(database_url(), autocommit=True) as connection:
        connection.execute(TABLE)
        jobs = [job for day in sys.argv[1:] for job in close(connection, day)]
    print(f"{len(jobs)} days to load, {len(sys.argv[1:]) - len(jobs)} loaded before")
    print(announce.options(after=jobs).sync.submit(len(jobs)).result(timeout=60))
