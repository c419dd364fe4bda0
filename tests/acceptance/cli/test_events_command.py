"""`rota events` against a live farm: followed through a restart of the server, in text and in JSON."""

import asyncio
import json
import sys

import pytest

from rota.cli.events import stream as events_stream
from rota.client.events import follow_events
from rota.client.http import HttpClient
from rota.local.api_key import ApiEndpoint
from rota.model.events import Event
from tests.integration.engine.events.events_support import job
from tests.integration.server.sse_support import ApiFarm, streams_of
from tests.support.commands import Terminal
from tests.support.waiting import until


@pytest.fixture
async def farm(database_url, redis_url, nats_url, bus_prefix):
    async with ApiFarm(database_url, redis_url, nats_url, bus_prefix) as farm:
        await farm.show()
        yield farm


@pytest.fixture
async def typed(farm, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROTA_API_URL", farm.replica.listen_url)
    monkeypatch.setenv("ROTA_API_KEY", await farm.key())
    return Terminal(monkeypatch, capsys)


class Following:
    """The command as a process of its own, and its lines."""

    def __init__(self, *words):
        self.words = words
        self.lines = []

    async def __aenter__(self):
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rota.cli", "events", *self.words, stdout=asyncio.subprocess.PIPE
        )
        self.reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_):
        self.reading.cancel()
        await asyncio.wait([self.reading])
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    async def _read(self):
        while line := await self.process.stdout.readline():
            self.lines.append(line.decode())

    async def until(self, count):
        await until(lambda: len(self.lines) >= count, within_s=20, what=f"{count} lines")
        return self.lines


async def _opened(farm, streams=1):
    await until(lambda: sum(map(len, streams_of(farm.replica)._open.values())) >= streams, within_s=20)


async def test_events_are_printed_as_they_happen_in_lines_and_as_json(farm, typed):
    teller = farm.replica.engine.event_publisher
    async with Following("--kind", "job") as text, Following("--kind", "job", "-o", "json", "--show", "film") as asjson:
        await _opened(farm, 2)
        teller.emit("job.failed", show="film", jobs=[job(1)], topic="render")
        teller.emit("job.succeeded", show="other", jobs=[job(2)], topic="render")
        teller.emit("job.succeeded", show="film", jobs=[job(3)], topic="render")
        lines = await text.until(3)
        assert lines[0].split()[1:] == ["job.failed", "film", str(job(1)), "topic=render"]
        told = [json.loads(line) for line in await asjson.until(2)]
        assert [event["job"] for event in told] == [str(job(1)), str(job(3))]
        assert set(told[0]) == set(Event.__struct_fields__)


async def test_one_run_of_a_workflow_is_followed_by_its_id(farm, typed):
    teller = farm.replica.engine.event_publisher
    async with Following("--run", str(job(8)), "--kind", "run.step,run.ended") as following:
        await _opened(farm)
        for kind in ("run.began", "run.step.failed", "run.ended.failed"):
            teller.emit(kind, show="film", runs=[job(7), job(8)], workflow="trip")
        lines = [line.split()[1:] for line in await following.until(2)]
        assert lines == [
            [kind, "film", f"run={job(8)}", "workflow=trip"] for kind in ("run.step.failed", "run.ended.failed")
        ]


async def test_a_reader_that_leaves_ends_it(farm, typed):
    async with Following("--kind", "job") as following:
        await _opened(farm)
        following.process.stdout._transport.close()
        for number in range(3):
            farm.replica.engine.event_publisher.emit("job.failed", show="film", jobs=[job(number)], topic="t")
            await farm.replica.engine.event_publisher.publish()
        assert await asyncio.wait_for(following.process.wait(), 10) == 0


async def test_bad_input_and_a_bad_key_are_one_sentence(typed, monkeypatch):
    said = await typed("events --kind job.exploded")
    assert (said.status, said.err.count("\n")) == (2, 1)
    assert "'job.exploded' is not a known kind of event: did you mean" in said.err
    monkeypatch.setenv("ROTA_API_KEY", "rota_0000000000_" + "0" * 39)
    said = await typed("events")
    assert (said.status, said.err.count("\n")) == (1, 1)
    assert "[unauthenticated]" in said.err


async def test_it_goes_on_after_every_cut_without_loss_or_double(farm):
    teller, key = farm.replica.engine.event_publisher, await farm.key()
    streams, seen = streams_of(farm.replica), []
    wire = HttpClient(lambda: ApiEndpoint(farm.replica.listen_url, key))

    async def follow():
        async for told in follow_events(
            wire, events_stream.EVENTS_PATH, {"kind": "job"}, on_unavailable=events_stream._report_unavailable
        ):
            seen.append(int(json.loads(told.data)["job"].replace("-", ""), 16))

    following = asyncio.create_task(follow())
    try:
        await until(lambda: streams._open)
        for number in range(30):
            teller.emit("job.failed", show="film", jobs=[job(2 * number), job(2 * number + 1)], topic="t")
            await teller.publish()
            if number % 10 == 5:
                for open_ones in list(streams._open.values()):
                    for stream in tuple(open_ones):
                        stream.end("cut")
        await until(lambda: len(seen) >= 60, within_s=20)
        assert seen == list(range(60))
    finally:
        following.cancel()
        await asyncio.wait([following])
        await wire.close()
