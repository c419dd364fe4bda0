"""Frames enqueued in a SQLAlchemy transaction commit and roll back with it, on every driver."""

from datetime import UTC, datetime, timedelta

import asyncpg
import pytest

from rota.queue import enqueue_on, enqueue_on_sync
from tests.support.queue import agreed, entry

sqlalchemy = pytest.importorskip(
    "sqlalchemy", reason="SQLAlchemy is a development dependency: `make setup` installs it"
)
asynchronous = pytest.importorskip("sqlalchemy.ext.asyncio")
orm = pytest.importorskip("sqlalchemy.orm")


LATER = entry("short", run_at=datetime(2100, 1, 1, tzinfo=UTC) + timedelta(hours=1))


def batch():
    return [entry(frames=3, payload=b"100% $1"), entry(priority=1, key="k"), LATER]


def with_driver(database_url, driver):
    return database_url.replace("postgresql://", f"postgresql+{driver}://", 1)


def asynchronous_engine(database_url, driver):
    if driver == "asyncpg":  # SQLAlchemy does not pass every URL option to asyncpg
        return asynchronous.create_async_engine(
            "postgresql+asyncpg://", async_creator=lambda: asyncpg.connect(database_url)
        )
    return asynchronous.create_async_engine(with_driver(database_url, driver))


async def waiting(database):
    counts = await agreed(database)
    return {name: counted["waiting"] + counted["deferred"] for name, counted in counts.items()}


@pytest.mark.parametrize("kind", ["connection", "session"])
async def test_enqueue_on_sync_connection_or_session_follows_its_transaction(database_url, database, kind):
    engine = sqlalchemy.create_engine(with_driver(database_url, "psycopg"))
    make = engine.connect if kind == "connection" else lambda: orm.Session(engine)
    with make() as using:
        enqueue_on_sync(using, batch())
        using.rollback()
        placed = enqueue_on_sync(using, batch())
        assert await waiting(database) == {}
        using.commit()
    engine.dispose()
    assert [(each.queue, each.priority, each.key, each.first_seq) for each in placed] == [
        ("film", 1, "k", 0),
        ("film", 5, None, 0),
    ]
    assert await waiting(database) == {"film": 4, "short": 1}


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
@pytest.mark.parametrize("kind", ["connection", "session"])
async def test_enqueue_on_async_connection_or_session_follows_its_transaction(database_url, database, driver, kind):
    engine = asynchronous_engine(database_url, driver)
    make = engine.connect if kind == "connection" else lambda: asynchronous.AsyncSession(engine)
    async with make() as using:
        await enqueue_on(using, batch())
        await using.rollback()
        placed = await enqueue_on(using, batch())
        assert await waiting(database) == {}
        await using.commit()
    await engine.dispose()
    assert [each.first_seq for each in placed] == [0, 0]
    assert await waiting(database) == {"film": 4, "short": 1}
