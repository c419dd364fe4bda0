"""Twenty-four days of uptime in minutes: what a server and its stores hold stays flat under a steady load.

A day lasts `UPTIME_S` / 24 (25 s of 600 s): see `accelerated_server`. The second quarter is compared with the last one.

    .venv/bin/python -m pytest -n 0 -m soak --timeout 3600 -s tests/chaos/uptime

Each job ends in one of the ways that leave something behind: results, failures, retries, cancellations, caps, keys.
"""

import asyncio
import os
import time
from pathlib import Path
from statistics import mean, median

import asyncpg
import pytest

from rota.engine.completion.canceller import JobCanceller
from rota.model.job_states import JobState
from rota.queue import Queue
from tests.chaos.pipeline.deployment import Farm
from tests.support.jobs import completions
from tests.support.queue import sql
from tests.support.waiting import until

UPTIME_S = float(os.environ.get("UPTIME_S", "600"))
DAYS = 24
DAY_S = UPTIME_S / DAYS
JOBS_PER_S = 12
GROWTH_MAX = 0.2
SLACK = {"disk": 2 << 20, "rows": 300, "dead rows": 1000, "rss": 4 << 20, "redis": 1 << 20, "stream": 1 << 20}
SLACK |= {"log": 64 << 10, "latency p50": 0.02, "latency p95": 0.1}
"""Differences that are noise, whatever their share: bytes, rows and seconds."""
SERVER_ENV = {
    "DAY_S": str(DAY_S),
    "ROTA_NATS_MAX_AGE": "60s",
    "ROTA_ACCOUNTING_RECOMPUTE_INTERVAL_SECONDS": "2",
    "ROTA_ACCOUNTING_LIMIT_RESEED_INTERVAL_SECONDS": "5",
    "ROTA_ACCOUNTING_RECALCULATE_SUBS_INTERVAL": "2s",
    "ROTA_REPLAYER_POLL_INTERVAL": "1s",
    "ROTA_WORKFLOW_POLL_INTERVAL": "1s",
}
TABLES = sql("""
SELECT c.relname, coalesce(pg_total_relation_size(c.oid), 0) AS bytes, coalesce(s.n_dead_tup, 0) AS dead
FROM pg_class c LEFT JOIN pg_stat_user_tables s ON s.relid = c.oid
WHERE c.relnamespace = 'rota'::regnamespace AND c.relkind = 'r' AND c.relname <> 'audit'""")
ENDED = sql("SELECT count(*) FROM rota.job WHERE pk_job = $1")
QUEUE_TABLES = ("queue", "ready", "deferred", "done_", "dlq", "outbox", "proc")


@pytest.fixture
async def farm(private_stack, tmp_path, proxy):
    stack = await private_stack("postgres", "redis", "nats")
    await vacuum_often(stack.url("postgres"))
    async with Farm(stack, tmp_path, proxy, links=False) as farm:
        await farm.show("film", burst=16)
        await farm.show("plain", burst=16, managed=False)
        await farm.start(servers=0, workers=0)
        await farm.add_server("server0", module="tests.chaos.uptime.accelerated_server", **SERVER_ENV)
        await farm.add_worker("worker0", slots=32)
        await farm.until_workers(1)
        yield farm


async def vacuum_often(url):
    """Autovacuum looks once a minute, which would be a few times in the whole run."""
    admin = await asyncpg.connect(url)
    await admin.execute("ALTER SYSTEM SET autovacuum_naptime = '1s'")
    await admin.execute("SELECT pg_reload_conf()")
    await admin.close()


async def submit_steadily(farm, until_s):
    """Jobs of every kind at a fixed rate; what is late is submitted later."""
    canceller = JobCanceller(farm.database, farm.bus, Queue(farm.database), completions(farm.database))
    for number in range(int(UPTIME_S * JOBS_PER_S)):
        await asyncio.sleep(max(0.0, until_s - UPTIME_S + number / JOBS_PER_S - time.monotonic()))
        if time.monotonic() > until_s:
            return
        show = "plain" if number % 4 == 0 else "film"
        match number % 12:
            case 0:
                await farm.submit("boom", ends=("FAILED",), show=show)
            case 1:
                await farm.submit("flaky", 1, layer={"retries": {"most": 2, "first_s": 0.1}}, show=show)
            case 2:
                await farm.submit("value", number, frames=3, show=show)
            case 3:
                job = await farm.submit("nap", 30, frames=2, ends=("CANCELLED",), show=show)
                await canceller.terminate(job, JobState.CANCELLED, "cancelled")
            case 4:
                await farm.submit("nap", 0.05, frames=4, max_cores=2, show=show)
            case 5:
                await farm.submit_on_bus("noop", frames=2)
            case _:
                await farm.submit("noop", frames=5, show=show)


async def measure_latency(farm, until_s, probes):
    """Seconds from submission to end of a single frame, once in a while."""
    while time.monotonic() < until_s:
        began = time.monotonic()
        job = await farm.submit("noop", show="film", priority=8)

        async def is_over(job=job):
            return not await farm.database.value(ENDED, job)

        await until(is_over, within_s=60, what="the end of a probe")
        now = time.monotonic()
        probes.append({"at": now, "took_s": now - began})
        await asyncio.sleep(0.4)


async def measure_sizes(farm, until_s, samples):
    while time.monotonic() < until_s:
        tables = await farm.database.rows(TABLES)
        rows = await count_rows(farm.database, [row["relname"] for row in tables])
        streams = [await farm.bus.stream_state(name) for name in ("JOBS", "SYS", "EVENTS")]
        memory = await farm.client.info("memory")
        samples.append(
            {
                "at": time.monotonic(),
                "disk": sum(row["bytes"] for row in tables),
                "rows": sum(rows.values()),
                "dead rows": sum(row["dead"] for row in tables),
                "rss": resident_bytes(farm.servers[0].pid),
                "redis": memory["used_memory_dataset"],
                "stream": sum(state.bytes for state in streams),
                "log": farm.servers[0].log.stat().st_size,
                "tables": {row["relname"]: row["bytes"] for row in tables},
                "rows of tables": rows,
            }
        )
        await asyncio.sleep(DAY_S / 8)


async def count_rows(database, tables):
    """The rows of each table of the queue, exactly; the statistics of PostgreSQL are estimates."""
    names = [name for name in tables if name.startswith(QUEUE_TABLES)]
    each = (f"SELECT '{name}' AS name, count(*) AS n FROM rota.{name}" for name in names)
    return {row["name"]: row["n"] for row in await database.rows(sql(" UNION ALL ".join(each)))}


def resident_bytes(pid):
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def in_quarter(began_s, number, samples):
    first = began_s + number * UPTIME_S / 4
    return [sample for sample in samples if first <= sample["at"] < first + UPTIME_S / 4]


def summary(samples, probes):
    """Means of a quarter; the log by what was added to it."""
    means = {what: mean(sample[what] for sample in samples) for what in SLACK if what in samples[0]}
    waits = sorted(probe["took_s"] for probe in probes)
    return means | {
        "log": samples[-1]["log"] - samples[0]["log"],
        "latency p50": median(waits),
        "latency p95": waits[int(len(waits) * 0.95)],
    }


def growth(second, last):
    """What grew by more than `GROWTH_MAX` and by more than its noise."""
    grown = [what for what in last if last[what] > second[what] * (1 + GROWTH_MAX)]
    return [
        f"{what} grew from {second[what]:,.3f} to {last[what]:,.3f}"
        for what in grown
        if last[what] - second[what] > SLACK[what]
    ]


def grown_tables(second, last, what="tables"):
    """The five tables that grew most: bytes or rows, before and after."""
    sizes = {
        name: tuple(round(mean(sample[what].get(name, 0) for sample in part)) for part in (second, last))
        for name in last[-1][what]
    }
    return sorted(sizes.items(), key=lambda item: item[1][0] - item[1][1])[:5]


@pytest.mark.soak
@pytest.mark.timeout(7200)
async def test_soak_uptime_of_24_days_keeps_sizes_and_latency_flat(farm, capsys):
    probes, samples = [], []
    began_s = time.monotonic()
    until_s = began_s + UPTIME_S
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(submit_steadily(farm, until_s))
        tasks.create_task(measure_latency(farm, until_s, probes))
        tasks.create_task(measure_sizes(farm, until_s, samples))
    await farm.quiet()
    second, last = (in_quarter(began_s, number, samples) for number in (1, 3))
    before, after = (summary(part, in_quarter(began_s, number, probes)) for part, number in ((second, 1), (last, 3)))
    with capsys.disabled():
        lines = [f"  {what}: {before[what]:,.3f}, {after[what]:,.3f}" for what in after]
        print(f"\nsoak uptime: {DAYS} days in {UPTIME_S:.0f} s, {len(farm.submits):,} jobs; second and last quarter:")
        print("\n".join(lines))
    tables, rows = grown_tables(second, last), grown_tables(second, last, "rows of tables")
    assert not (found := growth(before, after)), f"{found}; tables {tables}; rows {rows}"
    assert farm.servers[0].alive
    assert farm.metric("rota_days_dropped") >= DAYS / 2, "days must end"
    assert not farm.logged("worker_lost")
