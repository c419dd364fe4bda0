"""The SDK against real servers over their API: from a typed call to its result, its failure and its log."""

import asyncio
import multiprocessing
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import unquote, urlsplit
from uuid import UUID

import asyncpg
import django
import msgspec
import psycopg
import pydantic
import pytest
import structlog
from django import conf
from django.db import connections, transaction
from psycopg.rows import dict_row
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from rota import JobCancelled, JobFailed, JobTimedOut, NotEnded, Rota, context
from rota.client import http as wire
from rota.client import jobs as http
from rota.infra.telemetry import tracing
from rota.model.access import Role
from rota.model.errors import IdempotencyConflict, InvalidInput
from rota.server import services
from rota.server.http.middleware.rate_limit import REQUESTS_WAITING
from tests.support import replica_and_worker as worker_support
from tests.support import sdk_tasks
from tests.support.api import Api
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm, hanging
from tests.support.tracing import recording
from tests.support.waiting import until

LOSE_BYTES = sql("""
WITH before AS (UPDATE rota.frame_log SET last = false WHERE last
                AND stream IN (SELECT stream FROM rota.frame_log WHERE length(data) > 0) RETURNING *)
INSERT INTO rota.frame_log (pk_layer, frame, attempt, token, stream, at, data, last)
SELECT pk_layer, frame, attempt, token, stream, at + length(data) + $1::bigint, $2::bytea, true FROM before""")
"""The streams go on with data $2 after $1 lost bytes."""


class Shot(msgspec.Struct):
    name: str
    id: UUID
    at: datetime


class Scene(pydantic.BaseModel):
    shots: list[str]


tasks = Rota(show="film")


@tasks.task(topic="default")
async def name_of(shot: Shot) -> Shot:
    assert isinstance(shot, Shot)
    return msgspec.structs.replace(shot, name=shot.name.upper())


@tasks.task(topic="default")
async def shots_of(scene: Scene, *, first: bytes = b"") -> Scene:
    return Scene(shots=[*scene.shots, first.decode()])


@tasks.task(topic="default", name="square")
async def square(value: int) -> int:
    return value * value


@tasks.task(topic="default", name="boom")
async def boom() -> None: ...


@tasks.task(topic="default", name="hang")
async def hang(name: str) -> str: ...


@tasks.task(topic="default")
async def large(size: int) -> bytes:
    return bytes(size)


@tasks.task(topic="default", name="echo")
async def echo(value): ...


@tasks.task(topic="default")
async def talk(name: str) -> None:
    context().log("before\nnächste Zeile")
    await worker_support.gates[name].wait()
    context().log("after")


OWN_TASKS = (name_of, shots_of, large, talk)
THREADS = 24


@pytest.fixture
async def farm(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix, faces=services) as farm:
        await farm.show()
        for task in OWN_TASKS:
            worker_support.app.tasks[task.name] = task
        try:
            await farm.worker(slots=16)
            yield farm
        finally:
            for task in OWN_TASKS:
                del worker_support.app.tasks[task.name]
        await farm.quiet()


@pytest.fixture
async def key(farm):
    return await Api(farm).key(Role.ADMIN)


@pytest.fixture
async def app(farm, key):
    """The tasks above, submitted to the servers of the test."""
    rota = Rota(farm.replica.listen_url, key=key, show="film", actor="test")
    before = {task: task.app for task in tasks.tasks.values()}
    for task in before:
        task.app = rota
    yield rota
    for task, owner in before.items():
        task.app = owner
    await rota.close()


async def test_typed_values_round_trip(farm, app):
    shot = Shot("a", UUID(int=5), datetime(2030, 1, 2, tzinfo=UTC))
    job = await name_of.submit(shot)
    assert await job.result(timeout=15) == msgspec.structs.replace(shot, name="A")
    scene = await shots_of.submit(Scene(shots=["a"]), first=b"b")
    assert await scene.result(timeout=15) == Scene(shots=["a", "b"])
    view = await scene.get()
    assert (view.show, view.details.actor_id, view.details.actor_type) == ("film", "test", "service")


async def test_invalid_argument_fails_the_frame_with_one_sentence(farm, app):
    job = await name_of.submit({"name": "a"})
    with pytest.raises(JobFailed, match="shot does not fit: Object missing required field `id`") as raised:
        await job.result(timeout=15)
    assert (raised.value.reason, raised.value.frame, raised.value.layer) == ("bad_input", 0, "name_of")


async def test_sync_tasks_have_types_and_tracebacks_in_their_processes(farm, key):
    await farm.worker("apart", of="tests/support/sdk_tasks.py")
    async with Rota(farm.replica.listen_url, key=key, show="film") as elsewhere:
        lenses = elsewhere.task(name="lenses", topic="default")(sdk_tasks.lenses.function)
        breaks = elsewhere.task(name="breaks", topic="default")(sdk_tasks.breaks.function)
        wide, far = sdk_tasks.Camera(20, Path("a")), sdk_tasks.Camera(200, Path("b"))
        job = await lenses.submit(sdk_tasks.Scene(cameras={"wide": wide}), far)
        assert await job.result(timeout=20) == [wide, far]
        wrong = await lenses.submit({"cameras": {"wide": {"lens": "none", "film": "x"}}})
        with pytest.raises(JobFailed, match=r"scene does not fit: Input should be a valid number.*cameras\.wide\.lens"):
            await wrong.result(timeout=20)
        with pytest.raises(JobFailed, match="LookupError: on purpose") as raised:
            await (await breaks.submit("on purpose")).result(timeout=20)
        assert "raise LookupError(why)" in raised.value.traceback


async def test_map_and_submit_many_return_results(farm, app):
    job = await square.map(range(300))
    many = await square.submit_many([square.call(2), square.options(name="three").call(3)])
    assert await job.result(timeout=15) == [value * value for value in range(300)]
    assert [await each.result(timeout=15) for each in many] == [4, 9]
    assert await app.job(job.id).result() == [value * value for value in range(300)]
    assert (await many[1].get()).name == "three"


async def test_values_without_json_type_round_trip_also_in_bulk(farm, app):
    at = datetime(2030, 1, 2, tzinfo=UTC)
    given = {"bytes": b"\0\xff", "at": at, "list": [1, {"a": None}]}
    jobs = await echo.submit_many([echo.call(given), echo.call(b"plain")])
    assert [await job.result(timeout=15) for job in jobs] == [given, b"plain"]
    assert await (await echo.map([b"a", at])).result(timeout=15) == [b"a", at]


async def test_results_span_pages_and_waiters_exceed_connections(farm, app, monkeypatch):
    monkeypatch.setattr(http, "RESULTS_PAGE_SIZE", 7)
    monkeypatch.setattr(wire, "LONG_POLLS_MAX", 4)
    monkeypatch.setattr(wire, "CONNECTIONS_MAX", 8)
    jobs = await square.submit_many([square.call(number) for number in range(60)])
    assert await asyncio.gather(*(job.result(timeout=30) for job in jobs)) == [number**2 for number in range(60)]
    assert await (await square.map(range(30))).result(timeout=15) == [number**2 for number in range(30)]


async def test_log_is_followed_to_its_end(farm, app):
    gate = hanging("h")
    job = await talk.submit("h")
    pieces = job.logs(follow=True)
    text = ""
    while "before" not in text:
        text += await anext(pieces)
    gate.set()
    async for piece in pieces:
        text += piece
    assert text == "before\nnächste Zeile\nafter\n"
    assert "".join([piece async for piece in job.logs(0)]) == text
    with pytest.raises(InvalidInput):
        await anext(job.logs(layer="nobody"))


async def test_followed_log_repeats_no_bytes_after_a_gap(farm, app):
    hanging("h").set()
    job = await talk.submit("h")
    assert "".join([piece async for piece in job.logs(follow=True)]).endswith("after\n")
    await farm.database.run(LOSE_BYTES, 100, b"behind the gap\n")
    text = "".join([piece async for piece in job.logs(follow=True)])
    assert text.count("behind the gap\n") == 1
    assert text.startswith("before\n")


async def test_job_belongs_to_the_trace_of_its_submitter(farm, app, monkeypatch):
    recorder = recording(monkeypatch)
    with tracing.span("request"):
        jobs = [await square.submit(2), *await square.submit_many([square.call(3), square.call(4)])]
    for job in jobs:
        await job.wait(timeout=15)
    [request] = recorder.named("request")
    assert {span.parent.span_id for span in recorder.named("submit")} == {request.id}
    assert len(recorder.named("submit")) == 3


async def test_result_over_the_size_limit_fails_and_one_below_is_returned(farm, app):
    with pytest.raises(JobFailed) as raised:
        await (await large.submit(100_000)).result(timeout=15)
    assert raised.value.reason == "result_too_large", "no directory for large results is configured"
    assert await (await large.submit(60_000)).result(timeout=15) == bytes(60_000)


async def test_failure_is_typed_and_has_its_traceback(farm, app):
    job = await boom.submit()
    with pytest.raises(JobFailed, match="ValueError: no luck") as raised:
        await job.result(timeout=15)
    assert 'raise ValueError("no luck")' in raised.value.traceback
    assert "ValueError: no luck" in "".join([line async for line in job.logs()])


async def test_jobs_are_awaited_cancelled_and_their_events_read(farm, app):
    gate = hanging("h")
    job, other = await hang.submit("h"), await hang.options(deadline=0.2).submit("h")
    await farm.running("h")
    with pytest.raises(NotEnded, match=r"has not ended within 0\.05 s"):
        await job.wait(timeout=0.05)
    with pytest.raises(JobTimedOut, match="deadline_expired"):
        await other.result(timeout=15)
    assert await job.cancel() is True
    with pytest.raises(JobCancelled):
        await job.result(timeout=15)
    assert await job.cancel() is False
    states = [str(moment.state) async for moment in job.events()]
    assert (states[:2], states[-1]) == (["PENDING", "SCHEDULED"], "CANCELLED")
    gate.set()


async def _next(moments):
    return await anext(moments)


async def test_events_of_all_jobs_are_followed_and_resumed(farm, app):
    events = app.events(show="film", kinds=["job.succeeded", "job.failed"])
    first = asyncio.create_task(_next(events))
    await until(lambda: REQUESTS_WAITING._value.get() >= 1, what="a subscriber")
    jobs = [await square.submit(2), await boom.submit()]
    for job in jobs:
        await job.wait(timeout=15)
    seen = [await first, await anext(events)]
    await events.aclose()
    assert {(event.job, event.kind) for event in seen} == {(jobs[0].id, "job.succeeded"), (jobs[1].id, "job.failed")}
    later = await asyncio.to_thread(lambda: next(app.sync.events(kinds=["job"], after=seen[0].id)))
    assert later.job is not None
    with pytest.raises(InvalidInput, match="did you mean job"):
        await anext(app.events(kinds=["jobb"]))
    await asyncio.to_thread(app.sync.close)


async def test_idempotency_keys_and_waiting_reasons(farm, app):
    keyed = square.options(key="once")
    first, again = await keyed.submit(2), await keyed.submit(2)
    assert (first, again.already) == (again, True)
    with pytest.raises(IdempotencyConflict):
        await keyed.submit(3)
    later = await square.schedule(at="1h").submit(2)
    assert [cause.code for cause in (await later.explain()).reasons] == ["deferred"]
    await later.cancel()
    lost = await square.options(topic="nowhere", requires=["quantum"]).submit(2)
    with pytest.raises(JobFailed, match="no_pool_mapping"):
        await lost.result(timeout=15)
    await first.result(timeout=15)
    with pytest.raises(InvalidInput, match="There is no job"):
        await app.job(UUID(int=1)).state()


async def test_progress_bar_is_shown_only_on_a_terminal(farm, app, capsys, monkeypatch):
    # Another test may flush the scripts of the Redis that they share, which is logged.
    monkeypatch.setattr(sys.modules["rota.infra.redis.script"], "log", structlog.testing.CapturingLogger())
    await (await square.submit(2)).wait(timeout=15)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    await (await square.submit(2)).wait(timeout=15)
    assert "square" in capsys.readouterr().err


def submit_from_threads(url, key):
    """Submit from several threads at once."""
    rota = Rota(url, key=key, show="film")
    square = rota.task(name="square", topic="default")(lambda value: value)
    found, gate = [], threading.Barrier(THREADS)

    def work(number):
        gate.wait(10)
        found.append(square.sync.submit(number).id)

    running = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(30)
    return rota, square, found


async def test_sync_facade_serves_threads_and_forked_children(farm, key):
    rota, square, found = await asyncio.to_thread(submit_from_threads, farm.replica.listen_url, key)
    assert len(set(found)) == THREADS
    fork = multiprocessing.get_context("fork")
    results = fork.SimpleQueue()

    def in_child():
        job = square.sync.submit(12)
        results.put((str(job.id), job.result(15)))
        rota.sync.close()

    child = fork.Process(target=in_child)
    child.start()
    await asyncio.to_thread(child.join, 30)
    assert child.exitcode == 0
    job, value = results.get()
    assert value == 144
    values = await asyncio.to_thread(lambda: {rota.sync.job(each).result(15) for each in found})
    assert values == {number * number for number in range(THREADS)}, "the parent's connections still work"
    assert await asyncio.to_thread(rota.sync.job(job).state) == "SUCCEEDED"
    await asyncio.to_thread(rota.sync.close)


async def assert_no_job(app, job):
    with pytest.raises(InvalidInput, match="There is no job"):
        await app.job(job.id).state()


async def test_asyncpg_transaction_decides_the_submission(farm, app, database_url):
    connection = await asyncpg.connect(database_url)
    rolled_back = connection.transaction()
    await rolled_back.start()
    lost = await square.on(connection).submit(2)
    await rolled_back.rollback()
    await assert_no_job(app, lost)
    async with connection.transaction():
        job = await square.on(connection).map([1, 2])
        await assert_no_job(app, job)
    await connection.close()
    assert await job.result(timeout=15) == [1, 4]


async def test_psycopg_transaction_decides_the_submission(farm, app, database_url):
    async with await psycopg.AsyncConnection.connect(database_url, row_factory=dict_row) as connection:
        lost = await square.on(connection).submit(2)
        await connection.rollback()
        await assert_no_job(app, lost)
        job = await square.on(connection).submit(3)
    assert await job.result(timeout=15) == 9


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_sqlalchemy_transaction_decides_the_submission(farm, app, database_url, driver):
    engine = create_async_engine(database_url.partition("?")[0].replace("postgresql:", f"postgresql+{driver}:"))
    async with engine.connect() as connection:
        lost = await square.on(connection).submit(2)
        await connection.rollback()
        await assert_no_job(app, lost)
        job = await square.on(connection).submit(3)
        await connection.commit()
    await engine.dispose()
    assert await job.result(timeout=15) == 9


def as_django(database_url):
    """A connection as Django creates it."""
    if not conf.settings.configured:
        conf.settings.configure()
        django.setup()
    parts = urlsplit(database_url)
    connections.databases["rota"] = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.path.lstrip("/"),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": parts.hostname,
        "PORT": parts.port,
    }
    connections.configure_settings(connections.databases)
    return connections["rota"]


async def test_sync_connection_transactions_decide_the_submission(farm, app, database_url):
    def work():
        with psycopg.connect(database_url, row_factory=dict_row) as connection:
            lost = square.sync.on(connection).submit(2)
            connection.rollback()
            kept = [square.sync.on(connection).submit(3), square.sync.on(connection).map([1, 2])]
        engine = create_engine(database_url.replace("postgresql:", "postgresql+psycopg:"))
        with engine.begin() as connection:
            kept.append(square.sync.on(connection).submit(4))
        engine.dispose()
        return lost.unsync, [job.unsync for job in kept]

    lost, kept = await asyncio.to_thread(work)
    await assert_no_job(app, lost)
    assert [await job.result(timeout=15) for job in kept] == [9, [1, 4], 16]


async def test_django_transaction_decides_the_submission(farm, app, database_url):
    def work():
        connection = as_django(database_url)
        try:
            with transaction.atomic(using="rota"):
                lost = square.sync.on(connection).submit(2)
                transaction.set_rollback(True, using="rota")
            with transaction.atomic(using="rota"):
                kept = square.sync.on(connection).submit(5)
                with transaction.atomic(using="rota"):
                    inner = square.sync.on(connection).submit(6)
                    transaction.set_rollback(True, using="rota")
        finally:
            connection.close()
        return [job.unsync for job in (kept, lost, inner)]

    kept, *lost = await asyncio.to_thread(work)
    assert await kept.result(timeout=15) == 25
    for job in lost:
        await assert_no_job(app, job)


async def test_wrong_kind_of_connection_is_refused(app, database_url):
    with psycopg.connect(database_url) as connection, pytest.raises(InvalidInput, match=r"use task\.sync\.on"):
        await square.on(connection).submit(2)
    awaited = await asyncpg.connect(database_url)
    with pytest.raises(InvalidInput, match="must be awaited"):
        square.sync.on(awaited).submit(2)
    await awaited.close()
    with pytest.raises(InvalidInput, match="cannot be queued on a int"):
        square.sync.on(5).submit(2)
