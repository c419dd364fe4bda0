"""Single submissions of the SDK that share requests, on a real server and over a faulty network."""

import asyncio
import threading

import pytest

from rota import Rota
from rota.model import errors
from rota.model.access import Role
from rota.server import services
from rota.server.http.routes import jobs as job_routes
from tests.support.api import Api
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm
from tests.support.waiting import until

JOBS = sql("SELECT (SELECT count(*) FROM rota.job) + (SELECT count(*) FROM rota.job_done) AS jobs")


@pytest.fixture
async def farm(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix, faces=services) as farm:
        for show in ("film", "zebra"):
            await farm.show(show)
        await farm.worker(slots=16)
        yield farm


@pytest.fixture
async def network(farm, proxy):
    return await proxy("127.0.0.1", farm.replica.listener.port)


@pytest.fixture
async def app(farm, network):
    key = await Api(farm).key(Role.ADMIN)
    async with Rota(f"http://127.0.0.1:{network.port}", key=key, show="film") as app:
        yield app


@pytest.fixture
def batches(monkeypatch):
    """The sizes of the batches that the server received."""
    sizes = []
    submit_batch = job_routes.submit_items

    async def counted(actor, deps, items):
        sizes.append(len(items))
        return await submit_batch(actor, deps, items)

    monkeypatch.setattr(job_routes, "submit_items", counted)
    return sizes


def declared(app):
    async def square(value: int) -> int: ...

    return app.task(name="square", topic="default")(square)


async def test_concurrent_submissions_share_requests_and_return_their_own_results(farm, app, batches):
    square = declared(app)

    async def one(value):
        return await (await square.submit(value)).result(timeout=30)

    assert await asyncio.gather(*(one(value) for value in range(50))) == [value**2 for value in range(50)]
    assert batches
    assert batches[0] == 50
    assert await farm.database.value(JOBS) == 50


async def test_each_caller_gets_the_error_of_its_own_submission(app, batches):
    square = declared(app)
    await square.options(key="used").submit(1)
    calls = [
        square.options(show="nowhere"),
        square,
        square.options(folder="nowhere"),
        square.options(key="used"),
        square.options(show="zebra"),
        square.options(labels={"approval_by": "me"}),
    ]
    together = await asyncio.gather(*(call.submit(2) for call in calls), return_exceptions=True)
    assert batches == [6]
    for call, found in zip(calls, together, strict=True):
        if call is square or call.overrides.get("show") == "zebra":
            assert await found.result(timeout=30) == 4
            continue
        with pytest.raises(errors.RotaError) as alone:
            await call.submit(2)
        assert (type(found), found.sentence, found.facts) == (
            type(alone.value),
            alone.value.sentence,
            alone.value.facts,
        )
    assert batches == [6]


async def test_lost_reply_of_a_batch_makes_each_job_once(farm, network, app, batches):
    square = declared(app)
    await square.submit(0)
    network.drop_replies()
    submitting = [asyncio.create_task(square.submit(value)) for value in range(20)]
    await until(lambda: _has_jobs(farm, 21), what="the jobs of the lost reply")
    network.heal()
    network.reset()
    found = await asyncio.gather(*submitting)
    assert [job.already for job in found] == [False] * 20
    assert [await job.result(timeout=30) for job in found] == [value**2 for value in range(20)]
    assert await farm.database.value(JOBS) == 21
    assert batches[0] == 20


async def _has_jobs(farm, number):
    return await farm.database.value(JOBS) == number


async def test_submissions_during_an_outage_arrive_once_it_is_over(farm, network, app):
    square = declared(app)
    await square.submit(0)
    network.cut()
    submitting = [asyncio.create_task(square.submit(value)) for value in range(20)]
    await until(lambda: network.cuts, what="an attempt during the outage")
    network.heal()
    assert len({job.id for job in await asyncio.gather(*submitting)}) == 20
    assert await farm.database.value(JOBS) == 21


async def test_closing_the_app_does_not_lose_submissions(farm, network, app):
    square = declared(app)
    await square.submit(0)
    network.drop_replies()
    submitting = [asyncio.create_task(square.submit(value)) for value in range(20)]
    await until(lambda: _has_jobs(farm, 21), what="the jobs of the lost reply")
    network.heal()
    await app.close()
    assert len({job.id for job in await asyncio.gather(*submitting)}) == 20
    assert await farm.database.value(JOBS) == 21


async def test_threads_of_the_sync_facade_share_requests(farm, app, batches):
    square = declared(app)
    square_sync = square.sync
    found, ready = [], threading.Barrier(16)

    def work(number):
        square_sync.submit(number)  # opens the connection
        ready.wait(30)
        found.extend((value, square_sync.submit(value).id) for value in range(number * 10, number * 10 + 10))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join, 60)
    assert len({job for _, job in found}) == 160
    assert await farm.database.value(JOBS) == 176
    assert sum(batches) > 80, "most submissions shared a request"
    for value, job in found[::40]:
        assert await square.job(job).result(timeout=30) == value**2
