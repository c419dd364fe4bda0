"""Jobs submitted one at a time to a `rota up` without a worker, so that only submissions use the machine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Final

import asyncpg

from bench.api.submits import SINGLES_AT_ONCE, Bench
from bench.api.submits import Sizes as NoRounds
from bench.defaults.up import up
from bench.report import Figure
from rota.sdk.app import DEFAULT_SHOW

BARS: Final = {"http_single": 4_000.0, "sdk_single": 1_500.0, "transaction": 1_500.0}
NOTES: Final = {
    "http_single": f"a job a request, {SINGLES_AT_ONCE} at once",
    "sdk_single": f"`await task.submit()`, {SINGLES_AT_ONCE} at once",
    "transaction": "`task.on(conn).submit()` and a commit, one by one",
}
UNLIMITED: Final = {"ROTA_API_REQUESTS_PER_S": "0"}
"""One client is one key here, and a key may send 1,000 requests a second by default."""
SHORT: Final = 500
"""Jobs of a lap that the number of the next is taken from."""


async def measure(rounds: int, seconds: float) -> Iterator[Figure]:
    found: dict[str, list[float]] = {way: [] for way in BARS}
    async with _bench() as bench:
        for _ in range(rounds):
            for way, rates in found.items():
                short = await bench.single_per_s(way, SHORT)
                rates.append(await bench.single_per_s(way, round(short * seconds)))
    return (
        Figure(f"{way}_per_s", rates, bar=BARS[way], higher_is_better=True, note=NOTES[way])
        for way, rates in found.items()
    )


@asynccontextmanager
async def _bench() -> AsyncIterator[Bench]:
    async with up(UNLIMITED, worker=False) as instance:
        connection = await asyncpg.connect(instance.postgres_url)
        try:
            yield Bench(
                instance.database,
                instance.port,
                instance.key,
                instance.tasks.app,
                connection,
                NoRounds(),
                show=DEFAULT_SHOW,
            )
        finally:
            await connection.close()
