"""`rota events` against a running replica: text, JSON, filters and reconnection."""

import asyncio
import json
import sys

import pytest

from rota.cli.events import stream as events_stream
from rota.client.endpoint import ApiEndpoint
from rota.client.events import follow_events
from rota.client.http import HttpClient
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
async def cli(farm, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROTA_API_URL", farm.replica.listen_url)
    monkeypatch.setenv("ROTA_API_KEY", await farm.key())
    return Terminal(monkeypatch, capsys)


class EventsProcess:
    """`rota events` as a separate process, with the lines it prints."""

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


async def _until_open(farm, streams=1):
    await until(lambda: sum(map(len, streams_of(farm.replica)._open.values())) >= streams, within_s=20)


async def test_events_are_streamed_as_text_and_as_json(farm, cli):
    publisher = farm.replica.engine.event_publisher
    async with (
        EventsProcess("--kind", "job") as text,
        EventsProcess("--kind", "job", "-o", "json", "--show", "film") as as_json,
    ):
        await _until_open(farm, 2)
        publisher.emit("job.failed", show="film", jobs=[job(1)], topic="render")
        publisher.emit("job.succeeded", show="other", jobs=[job(2)], topic="render")
        publisher.emit("job.succeeded", show="film", jobs=[job(3)], topic="render")
        lines = await text.until(3)
        assert lines[0].split()[1:] == ["job.failed", "film", str(job(1)), "topic=render"]
        events = [json.loads(line) for line in await as_json.until(2)]
        assert [event["job"] for event in events] == [str(job(1)), str(job(3))]
        assert set(events[0]) == set(Event.__struct_fields__)


async def test_events_of_one_workflow_run_are_filtered_by_run_id(farm, cli):
    publisher = farm.replica.engine.event_publisher
    async with EventsProcess("--run", str(job(8)), "--kind", "run.step,run.ended") as following:
        await _until_open(farm)
        for kind in ("run.began", "run.step.failed", "run.ended.failed"):
            publisher.emit(kind, show="film", runs=[job(7), job(8)], workflow="trip")
        lines = [line.split()[1:] for line in await following.until(2)]
        assert lines == [
            [kind, "film", f"run={job(8)}", "workflow=trip"] for kind in ("run.step.failed", "run.ended.failed")
        ]


async def test_events_command_exits_when_its_output_is_closed(farm, cli):
    async with EventsProcess("--kind", "job") as following:
        await _until_open(farm)
        following.process.stdout._transport.close()
        for number in range(3):
            farm.replica.engine.event_publisher.emit("job.failed", show="film", jobs=[job(number)], topic="t")
            await farm.replica.engine.event_publisher.publish()
        assert await asyncio.wait_for(following.process.wait(), 10) == 0


async def test_invalid_kind_or_key_prints_one_error(cli, monkeypatch):
    result = await cli("events --kind job.exploded")
    assert (result.status, result.err.count("\n")) == (2, 1)
    assert "'job.exploded' is not a known kind of event: did you mean" in result.err
    monkeypatch.setenv("ROTA_API_KEY", "rota_0000000000_" + "0" * 39)
    result = await cli("events")
    assert (result.status, result.err.count("\n")) == (1, 1)
    assert "[unauthenticated]" in result.err


async def test_event_stream_resumes_after_cuts_without_loss_or_duplicates(farm):
    publisher, key = farm.replica.engine.event_publisher, await farm.key()
    streams, seen = streams_of(farm.replica), []
    client = HttpClient(lambda: ApiEndpoint(farm.replica.listen_url, key))

    async def follow():
        async for events in follow_events(
            client, events_stream.EVENTS_PATH, {"kind": "job"}, on_unavailable=events_stream._report_unavailable
        ):
            seen.append(int(json.loads(events.data)["job"].replace("-", ""), 16))

    following = asyncio.create_task(follow())
    try:
        await until(lambda: streams._open)
        for number in range(30):
            publisher.emit("job.failed", show="film", jobs=[job(2 * number), job(2 * number + 1)], topic="t")
            await publisher.publish()
            if number % 10 == 5:
                for open_ones in list(streams._open.values()):
                    for stream in tuple(open_ones):
                        stream.end("cut")
        await until(lambda: len(seen) >= 60, within_s=20)
        assert seen == list(range(60))
    finally:
        following.cancel()
        await asyncio.wait([following])
        await client.close()
