"""Foundations: how fast the stack starts, and what our loader and pool add to the bare clients.

Ratios are taken in alternation within one run (ours, bare, ours, bare, …), so that a noisy minute hits both alike.
Starts are timed from outside: from spawning Python to the moment all three servers have answered.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import asyncpg
import msgspec

from bench.report import Figure, Report
from rota.infra.postgres import Database, PostgresTarget
from rota.infra.postgres.sql import query
from rota.infra.redis import RedisTarget, connect, script
from rota.local import LocalStack, StackOptions

Call = Callable[[], Awaitable[object]]
ONE = query("bench", "one")


class Counted(msgspec.Struct, frozen=True, tag="counted"):
    hits: int
    label: str


COUNT = script("bench", "count", replies=Counted)


def run(quick: bool) -> Report:
    report = Report()
    starts = 3 if quick else 9
    rounds, calls = (9, 300) if quick else (25, 1000)
    with tempfile.TemporaryDirectory(prefix="rota-bench-") as folder:
        data = Path(folder) / "data"
        cold = [_start_s(data, fresh=True) for _ in range(starts)]
        warm = [_start_s(data, fresh=False) for _ in range(starts)]
        help_s = [_help_s() for _ in range(5 if quick else 15)]
        lua, sql = asyncio.run(_overheads(Path(folder) / "calls", rounds, calls))
    report.add(Figure("cold_start_s", cold, bar=3, note="empty data directory to all three servers answering"))
    report.add(Figure("warm_start_s", warm, bar=0.7, note="the same on an existing data directory"))
    report.add(Figure("help_s", help_s, bar=0.2, note="rota --help"))
    report.add(Figure("lua_call_vs_bare", lua, bar=1.3, note=f"script loader / bare EVALSHA, {calls} calls a round"))
    report.add(Figure("query_vs_bare", sql, bar=1.3, note=f"our pool / bare asyncpg connection, {calls} calls a round"))
    return report


def _start_s(data: Path, *, fresh: bool) -> float:
    if fresh:
        shutil.rmtree(data, ignore_errors=True)
    began = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-m", "bench.start_once", str(data)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin
    assert child.stdout
    assert child.stdout.readline() == "ready\n", "the stack did not start"
    took_s = time.perf_counter() - began
    child.stdin.close()
    child.stdout.close()
    assert child.wait(60) == 0
    return took_s


def _help_s() -> float:
    began = time.perf_counter()
    subprocess.run([Path(sys.executable).with_name("rota"), "--help"], check=True, capture_output=True)
    return time.perf_counter() - began


async def _overheads(data: Path, rounds: int, calls: int) -> tuple[list[float], list[float]]:
    stack = LocalStack(StackOptions(data, servers=("postgres", "redis")))
    await stack.start()
    try:
        return (
            await _lua_ratios(stack.url("redis"), rounds, calls),
            await _query_ratios(stack.url("postgres"), rounds, calls),
        )
    finally:
        await stack.stop()


async def _lua_ratios(url: str, rounds: int, calls: int) -> list[float]:
    client = connect(RedisTarget(url=url))
    try:
        await COUNT(client, hits="bench:hits", by=1, label="warm")
        return await _ratios(
            lambda: COUNT(client, hits="bench:hits", by=1, label="frame-1"),
            lambda: client.evalsha(COUNT.sha, 1, "bench:hits", 1, "frame-1"),
            rounds,
            calls,
        )
    finally:
        await client.aclose()


async def _query_ratios(url: str, rounds: int, calls: int) -> list[float]:
    database = await Database.open(PostgresTarget(url=url))
    bare = await asyncpg.connect(url)
    try:
        return await _ratios(
            lambda: database.value(ONE, 1),
            lambda: bare.fetchval(ONE.text, 1),
            rounds,
            calls,
        )
    finally:
        await bare.close()
        await database.close()


async def _ratios(ours: Call, bare: Call, rounds: int, calls: int) -> list[float]:
    await _time_s(ours, calls)
    await _time_s(bare, calls)
    return [await _time_s(ours, calls) / await _time_s(bare, calls) for _ in range(rounds)]


async def _time_s(call: Call, calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        await call()
    return time.perf_counter() - began
