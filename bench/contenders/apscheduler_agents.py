"""APScheduler 4: schedules in PostgreSQL, one asynchronous scheduler that runs them too, all due at once."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from apscheduler import AsyncScheduler  # type: ignore[import-not-found]
from apscheduler.datastores.sqlalchemy import SQLAlchemyDataStore  # type: ignore[import-not-found]
from apscheduler.triggers.interval import IntervalTrigger  # type: ignore[import-not-found]
from sqlalchemy.ext.asyncio import create_async_engine

from bench.contenders.apscheduler_body import RUNNING, noop
from bench.contenders.serve import Body, Countdown, fill_s, serve

CONCURRENT = 100


def _scheduler(url: str) -> Any:
    engine = create_async_engine("postgresql+psycopg://" + url.partition("://")[2])
    return AsyncScheduler(SQLAlchemyDataStore(engine), max_concurrent_jobs=CONCURRENT)


class APScheduler:
    async def prepare(self, url: str) -> None:
        async with _scheduler(url):
            """Its tables are made by entering."""

    async def fill(self, url: str, bodies: list[Body]) -> float:
        due = datetime.now(UTC) - timedelta(seconds=1)
        async with _scheduler(url) as scheduler:

            async def put(batch: list[Body]) -> None:
                for body in batch:
                    trigger = IntervalTrigger(hours=1, start_time=due)
                    await scheduler.add_schedule(noop, trigger, id=f"agent-{body['frame']}")

            return await fill_s(bodies, put)

    async def drain(self, url: str, n: int) -> float:
        ran = Countdown(n)
        RUNNING.append(ran)
        async with _scheduler(url) as scheduler:
            await scheduler.start_in_background()
            await ran.finished()
            await scheduler.stop()
            await scheduler.wait_until_stopped()
        RUNNING.clear()
        return ran.took_s()


if __name__ == "__main__":
    serve(APScheduler())
