"""A worker and its servers: registration, loss, outages, drain and stop."""

import asyncio
from urllib.parse import urlsplit

import pytest
import structlog

from rota.infra.nats import NatsTarget
from rota.infra.nats.topology import streams
from rota.model.errors import SetupFailed
from rota.model.protocol import AttemptStatus
from rota.model.settings.servers import NatsSettings
from rota.worker import result_reporter, session
from rota.worker.worker import Worker
from tests.integration.infra.nats_support import delete_stream
from tests.integration.worker.worker_support import Running, plan_for, serving, task, tokens_of, workers
from tests.support.waiting import until


@pytest.fixture
async def server(nats_url, bus_prefix):
    async with serving(nats_url, bus_prefix) as running:
        yield running


@pytest.fixture
async def start(nats_url, bus_prefix, server, tmp_path):
    async with workers(nats_url, bus_prefix, server, tmp_path) as factory:
        yield factory


@pytest.fixture
async def far(proxy, nats_url):
    """A faulty network in front of NATS."""
    address = urlsplit(nats_url)
    return await proxy(address.hostname, address.port)


@pytest.fixture
def waiting_report():
    """Wait until a report could not be stored."""
    with structlog.testing.capture_logs() as logs:
        yield lambda: until(
            lambda: any(line["event"] == "report_publish_retrying" for line in logs), what="a waiting report"
        )


async def test_worker_registers_with_its_offer(server, start):
    await start(offer={"name": "w7", "pool": "gpu", "gpus": 2, "labels": {"rack": "b"}, "capabilities": ("blender",)})
    (registration,) = server.hellos
    assert (registration.name, registration.pool, registration.gpus, registration.labels) == (
        "w7",
        "gpu",
        2,
        {"rack": "b"},
    )
    assert {"add", "sync_add"} <= set(registration.tasks)
    assert registration.capabilities == ("blender",)


async def test_refused_worker_ends_with_the_message_of_the_server(nats_url, bus_prefix, tmp_path):
    async with serving(nats_url, bus_prefix, refusal="There is no pool x.") as server:
        running = Running(
            Worker(plan_for(tmp_path), NatsTarget(url=nats_url, prefix=bus_prefix), streams(NatsSettings())), server
        )
        with pytest.raises(SetupFailed, match="refused this worker: There is no pool x"):
            await running.task


async def test_worker_waits_for_the_first_server(nats_url, bus_prefix, tmp_path):
    target = NatsTarget(url=nats_url, prefix=bus_prefix, publish_timeout_s=0.1)
    with structlog.testing.capture_logs() as logs:
        running = Running(Worker(plan_for(tmp_path), target, streams(NatsSettings())), None)
        await until(
            lambda: any(line["event"] == "worker_registration_retrying" for line in logs), what="its first attempt"
        )
        async with serving(nats_url, bus_prefix) as server:
            running.server = server
            await running.until_ready()
            assert await server.run("nothing") is None
            await running.end()


async def test_worker_declared_lost_kills_its_frames_and_registers_again(server, start):
    await start()
    first = server.workers[0]
    token = await server.send("waits", 2)
    slow = await server.send(task("sleeps"), args=[60])
    await server.began(slow)
    with structlog.testing.capture_logs() as logs:
        await server.publish_liveness(lost=[first])
        await until(lambda: len(server.workers) == 2 and server.beats(), what="another registration")
    (line,) = [line for line in logs if line["event"] == "worker_session_lost"]
    assert (line["reason"], line["frames"]) == ("told", 3)
    assert await server.run("nothing") is None
    assert tokens_of(server.beats()[-1].held).isdisjoint({token, token + 1, slow})
    assert server.ends.keys().isdisjoint({token, token + 1, slow})


async def test_control_plane_away_for_longer_than_the_lease_stops_no_frame(nats_url, bus_prefix, tmp_path):
    async with (
        serving(nats_url, bus_prefix, lease_s=0.6) as server,
        workers(nats_url, bus_prefix, server, tmp_path) as start,
    ):
        await start()
        token = await server.send("tidies", args=[str(tmp_path / "note")])
        await server.began(token)
        await until(lambda: len(server.beats()) >= 6, what="more time than its lease")
        assert len(server.workers) == 1, "its lease was renewed all the time"
        with structlog.testing.capture_logs() as logs:
            server.confirms_liveness = False
            await until(
                lambda: any(line["event"] == "servers_silent" for line in logs), what="more time than its lease"
            )
            beats = len(server.beats())
            await until(lambda: len(server.beats()) > beats + 3, what="more heartbeats")
        assert (len(server.workers), (tmp_path / "note").exists()) == (1, False)
        assert token in tokens_of(server.beats()[-1].held)
        server.confirms_liveness = True
        [worker] = server.workers
        await server.publish_liveness(lost=[worker])
        await until((tmp_path / "note").exists, what="its frame to stop: it was given to another worker")
        await until(lambda: len(server.workers) == 2, what="another registration")
        assert token not in server.ends


async def test_results_are_kept_during_a_bus_outage(server, start, far, nats_url, waiting_report):
    await start(url=far.url(nats_url), publish_timeout_s=0.3)
    token = await server.send("naps", 3, args=[0.3])
    await server.began(token)
    far.cut()
    await waiting_report()
    assert token not in server.ends
    far.heal()
    ends = await server.ended(token, 3)
    assert [end.status for end in ends] == [AttemptStatus.SUCCEEDED] * 3
    await until(lambda: server.beats()[-1].held == [], what="an empty heartbeat")
    assert await server.run("nothing", 100) == [None] * 100
    assert server.twice == []


async def test_report_with_a_lost_confirmation_is_stored_once(server, start, far, nats_url, waiting_report):
    await start(url=far.url(nats_url), publish_timeout_s=0.3)
    token = await server.send("naps", args=[0.2])
    await server.began(token)
    far.drop_replies()
    await waiting_report()
    await server.ended(token)
    far.heal()
    far.reset()
    assert await server.run("nothing") is None
    assert server.twice == []


async def test_lost_streams_are_recreated(server, start):
    await start()
    token = await server.send("naps", args=[0.2])
    await server.began(token)
    await delete_stream(server.bus, "SYS")
    await delete_stream(server.bus, "JOBS")
    await server.ended(token)
    assert await server.run("nothing") is None


async def test_full_result_backlog_stops_the_intake_until_stored(server, start, monkeypatch):
    publish, may_store = result_reporter.ResultReporter._publish, asyncio.Event()

    async def delayed_publish(self, report):
        await may_store.wait()
        return await publish(self, report)

    monkeypatch.setattr(result_reporter.ResultReporter, "_publish", delayed_publish)
    monkeypatch.setattr(result_reporter, "BACKLOG_ENDS_MAX", 5)
    await start()
    first = await server.send("nothing", 10)
    await server.held(first)
    second = await server.send("nothing")
    seen = len(server.beats())
    await until(lambda: len(server.beats()) >= seen + 3, what="enough time to accept it")
    assert second not in tokens_of(server.beats()[-1].held)
    may_store.set()
    assert await server.ended(first, 10) == [None] * 10
    assert await server.ended(second) is None


async def test_drain_finishes_running_frames_and_refuses_new_ones(server, start):
    running = await start(processes=1)
    token = await server.send("naps", args=[0.5])
    sync = await server.send(task("sleeps"), 3, args=[0.5])
    await server.began(sync)
    ending = asyncio.create_task(running.drain())
    await until(lambda: server.beats()[-1].draining, what="a draining heartbeat")
    assert (await server.run("nothing")).code == "draining"
    await ending
    assert (await server.ended(token)).status is AttemptStatus.SUCCEEDED
    ends = await server.ended(sync, 3)
    assert ends[0] is None
    assert [(end.status, end.code) for end in ends[1:]] == [(AttemptStatus.REFUSED, "worker_stopped")] * 2
    await until(lambda: server.beats()[-1].held == [], what="the last heartbeat")
    assert server.beats()[-1].draining
    assert server.twice == []


async def test_drain_returns_frames_that_do_not_finish_in_time(server, start):
    running = await start(drain_s=0.2)
    token = await server.send("waits")
    await server.began(token)
    await running.drain(within_s=5)
    end = await server.ended(token)
    assert (end.status, end.code) == (AttemptStatus.REFUSED, "worker_stopped")


async def test_cancelled_worker_returns_all_frames_at_once(server, start):
    running = await start()
    token = await server.send("waits", 2)
    await server.began(token)
    running.task.cancel()
    async with asyncio.timeout(session.ABORT_TIMEOUT_S + 2):
        await asyncio.wait([running.task])
    assert [end.code for end in await server.ended(token, 2)] == ["worker_stopped"] * 2
    assert server.twice == []
