"""Frames in series on one worker: one after the other on one slot, and handed back when they should run elsewhere."""

import asyncio
from uuid import uuid4

import pytest

from rota.model.protocol import AssignedRange, Assignment, AttemptStatus, encode
from tests.integration.worker.series_support import HANDED_BACK, KEY, ends_of, how_it_ended, recall, send_series
from tests.integration.worker.worker_support import command, serving, task, workers
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
def patience(monkeypatch):
    """Series are handed back on request only."""
    monkeypatch.setattr("rota.worker.frame_table.HAND_BACK_AFTER_S", 3600.0)


SOME = {"async": "records", "sync": "records_sync"}


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_frames_of_a_series_run_one_after_the_other_in_order(server, start, tmp_path, kind):
    await start(offer={"slots": 1, "cores": 1})
    book = tmp_path / "book"
    tokens = await send_series(server, *((SOME[kind], str(book), at, 0.01) for at in range(6)))
    assert await ends_of(server, tokens) == list(range(6))
    lines = book.read_text().split()
    assert lines == [word for at in range(6) for word in (f"+{at}", f"-{at}")], "two ran at the same time"


@pytest.mark.usefixtures("patience")
async def test_series_of_commands_takes_one_slot(server, start, tmp_path):
    await start(offer={"slots": 1, "cores": 1})
    book = tmp_path / "book"
    script = f"echo +$ROTA_FRAME >> {book}; sleep 0.02; echo -$ROTA_FRAME >> {book}"
    tokens = await send_series(server, (command("sh", "-c", script),), n=4)
    assert await ends_of(server, tokens) == [None] * 4
    lines = book.read_text().split()
    assert [line[1:] for line in lines[::2]] == [line[1:] for line in lines[1::2]]
    assert {line[0] for line in lines[::2]} == {"+"}


@pytest.mark.usefixtures("patience")
async def test_frames_of_one_layer_that_return_nothing_run_as_a_range(server, start):
    await start(offer={"slots": 1, "cores": 1})
    tokens = await send_series(server, ("nothing",), n=200)
    assert await ends_of(server, tokens) == [None] * 200
    assert sum(len(report.done) for report in server.reports) <= 8


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_results_of_a_series_are_reported_together_when_it_ends(server, start, monkeypatch, tmp_path, kind):
    """The wait for more of them is endless here, so the end of the series is what makes them due."""
    monkeypatch.setattr("rota.worker.result_reporter.SERIES_WAIT_S", 3600.0)
    await start(offer={"slots": 2, "cores": 2})
    tokens = await send_series(server, *((SOME[kind], str(tmp_path / "book"), at, 0.01) for at in range(20)))
    assert await ends_of(server, tokens) == list(range(20))
    assert len(server.reports) <= 2


@pytest.mark.usefixtures("patience")
async def test_result_of_a_frame_alone_does_not_wait_for_a_series_beside_it(server, start, monkeypatch):
    monkeypatch.setattr("rota.worker.result_reporter.SERIES_WAIT_S", 3600.0)
    await start(offer={"slots": 2, "cores": 2})
    tokens = await send_series(server, ("add", 1), ("waits",), ("add", 2))
    assert how_it_ended(await server.run("add", args=(7,))) == 7
    await recall(server, (tokens[0], len(tokens)))
    assert (await ends_of(server, tokens[-1:]))[0] == HANDED_BACK


@pytest.mark.usefixtures("patience")
async def test_failed_frame_does_not_end_its_series(server, start):
    await start(offer={"slots": 1, "cores": 1})
    tokens = await send_series(server, ("add", 1), ("fails", "value", "no luck"), ("add", 2), ("missing",), ("add", 3))
    assert await ends_of(server, tokens) == [
        1,
        (AttemptStatus.FAILED, "exception"),
        2,
        (AttemptStatus.REFUSED, "unknown_task"),
        3,
    ]


@pytest.mark.usefixtures("patience")
async def test_durations_of_frames_are_reported_by_their_work(server, start):
    await start(offer={"slots": 1, "cores": 1})
    tokens = await send_series(server, ("nothing",), ("naps", 0.02), ("add", 1), n=3)
    await server.ended(tokens[0], len(tokens))
    found = {}
    for report in server.reports:
        for key, *times in report.timings:
            found[key] = [known + more for known, more in zip(found.get(key, [0, 0, 0]), times, strict=True)]
    assert {key: frames for key, (frames, _, _) in found.items()} == {KEY: 3, KEY + 1: 3, KEY + 2: 3}
    assert all(run_us <= slot_us + frames for frames, run_us, slot_us in found.values())
    for kept in (1, 2):
        assert found[KEY + 1][kept] >= 60_000 > max(found[KEY][kept], found[KEY + 2][kept])


@pytest.mark.usefixtures("patience")
async def test_time_for_which_a_frame_waits_for_a_process_counts_as_time_on_its_slot(server, start):
    await start(offer={"slots": 2, "cores": 2}, processes=1)
    busy = await server.send("naps_sync", args=[0.3])
    await server.began(busy)
    tokens = await send_series(server, ("add_sync", 1), ("add_sync", 2))
    assert await ends_of(server, tokens) == [1, 2]
    [(key, frames, run_us, slot_us)] = [each for report in server.reports for each in report.timings if each[0] == KEY]
    assert (key, frames) == (KEY, 1)
    assert run_us < 100_000 < slot_us


@pytest.mark.usefixtures("patience")
async def test_recalled_frames_are_handed_back_and_the_running_one_goes_on(server, start):
    await start(offer={"slots": 1, "cores": 1})
    tokens = await send_series(server, ("naps", 0.3), ("add", 1), ("add", 2), ("add", 3))
    await server.began(tokens[0])
    await recall(server, (tokens[0], len(tokens)))
    assert await ends_of(server, tokens[1:]) == [HANDED_BACK] * 3
    assert tokens[0] not in server.ends
    assert await ends_of(server, tokens[:1]) == [0.3]
    assert await server.run("nothing") is None, "the slot is free again"


@pytest.mark.usefixtures("patience")
async def test_recall_reaches_only_the_series_of_its_frames(server, start):
    await start(offer={"slots": 3, "cores": 3})
    kept = await send_series(server, ("naps", 0.2), ("add", 1))
    given = await send_series(server, ("naps", 0.2), ("add", 1))
    alone = await server.send("naps", args=[0.2])
    for token in (kept[0], given[0], alone):
        await server.began(token)
    await recall(server, (given[1], 1), (alone, 1), (5, 1))
    await recall(server, (-5, 2))
    assert await ends_of(server, given) == [0.2, HANDED_BACK]
    assert await ends_of(server, kept) == [0.2, 1]
    assert await ends_of(server, [alone]) == [0.2]


@pytest.mark.usefixtures("patience")
async def test_series_of_which_nothing_has_run_keeps_its_first_frame_when_recalled(server, start):
    """No process is free for it: if it gave up its slot, it would be assigned to the same slot again."""
    await start(offer={"slots": 2, "cores": 2}, processes=1)
    busy = await server.send("naps_sync", args=[0.3])
    await server.began(busy)
    tokens = await send_series(server, ("add_sync", 1), ("add_sync", 2), ("add_sync", 3))
    await server.held(tokens[0])
    await recall(server, (tokens[0], 3))
    assert await ends_of(server, tokens[1:]) == [HANDED_BACK] * 2
    assert busy not in server.ends
    assert await ends_of(server, tokens[:1]) == [1]
    again = await send_series(server, ("add", 1), ("add", 2))
    assert await ends_of(server, again) == [1, 2]


async def test_series_of_which_nothing_has_run_keeps_its_first_frame_without_a_request(server, start):
    await start(offer={"slots": 2, "cores": 2}, processes=1)
    busy = await server.send("naps_sync", args=[0.8])
    await server.began(busy)
    tokens = await send_series(server, ("add_sync", 1), ("add_sync", 2))
    assert await ends_of(server, tokens[1:]) == [HANDED_BACK]
    assert busy not in server.ends
    assert await ends_of(server, tokens[:1]) == [1]


@pytest.mark.usefixtures("patience")
async def test_draining_worker_hands_back_a_series_of_which_nothing_has_run(server, start):
    worker = await start(offer={"slots": 2, "cores": 2}, processes=1)
    busy = await server.send("naps_sync", args=[0.3])
    await server.began(busy)
    tokens = await send_series(server, ("add_sync", 1), ("add_sync", 2))
    await server.held(tokens[0])
    await worker.drain()
    assert await ends_of(server, tokens) == [HANDED_BACK] * 2
    assert await ends_of(server, [busy]) == [0.3]


async def test_frames_behind_a_long_one_are_handed_back_without_a_request(server, start):
    await start(offer={"slots": 1, "cores": 1})
    tokens = await send_series(server, ("add", 1), ("naps", 1.0), ("add", 2), ("add", 3))
    assert await ends_of(server, tokens[2:]) == [HANDED_BACK] * 2
    assert tokens[1] not in server.ends, "they waited for it"
    assert await ends_of(server, tokens[:2]) == [1, 1.0]


@pytest.mark.usefixtures("patience")
async def test_cancelled_frames_of_a_series_do_not_run(server, start):
    await start(offer={"slots": 1, "cores": 1})
    tokens = await send_series(server, ("waits",), ("add", 1), ("add", 2), ("add", 3))
    await server.began(tokens[0])
    await server.cancel(tokens[2])
    assert (await server.ended(tokens[2])).status is AttemptStatus.CANCELLED
    await server.cancel(tokens[0])
    assert (await server.ended(tokens[0])).status is AttemptStatus.CANCELLED
    assert await ends_of(server, [tokens[1]]) == [1]
    assert await ends_of(server, [tokens[3]]) == [3]


@pytest.mark.usefixtures("patience")
async def test_cancelled_series_releases_its_slot(server, start):
    await start(offer={"slots": 1, "cores": 1})
    tokens = await send_series(server, ("waits",), ("add", 1), ("add", 2))
    await server.began(tokens[0])
    await server.cancel(tokens[0], len(tokens))
    assert {end.status for end in await server.ended(tokens[0], 3)} == {AttemptStatus.CANCELLED}
    assert await server.run("nothing") is None


@pytest.mark.usefixtures("patience")
async def test_draining_worker_hands_back_what_has_not_started(server, start):
    worker = await start(offer={"slots": 1, "cores": 1})
    tokens = await send_series(server, ("naps", 0.2), ("add", 1), ("add", 2))
    await server.began(tokens[0])
    await worker.drain()
    assert await ends_of(server, tokens) == [0.2, HANDED_BACK, HANDED_BACK]


@pytest.mark.usefixtures("patience")
async def test_redelivered_series_runs_once(server, start):
    await start(offer={"slots": 1, "cores": 1})
    first, job, layer = server.tokens(), uuid4(), uuid4()
    series = [AssignedRange(first, 3, job, layer, 1, 1, 0, None, None, 1, "", first + 2)]
    data = encode(Assignment([task("nothing")], series, [KEY]))
    for _ in range(3):
        await server.publish(data)
    assert await server.ended(first, 3) == [None] * 3
    assert await server.run("nothing") is None
    assert not server.twice


@pytest.mark.usefixtures("patience")
async def test_series_without_room_is_refused_as_a_whole(server, start):
    await start(offer={"slots": 1, "cores": 1})
    busy = await server.send("naps", args=[0.3])
    await server.began(busy)
    tokens = await send_series(server, ("add", 1), ("add", 2))
    assert await ends_of(server, tokens) == [(AttemptStatus.REFUSED, "no_room")] * 2
    assert busy not in server.ends


@pytest.mark.usefixtures("patience")
async def test_gpu_is_taken_by_one_frame_of_a_series_at_a_time(server, start):
    await start(offer={"slots": 2, "cores": 2, "gpus": 1})
    tokens = await send_series(server, *((task("where", gpus=1),) for _ in range(3)))
    assert [where[4] for where in await ends_of(server, tokens)] == [[0]] * 3
    again = await send_series(server, *((task("where", gpus=1),) for _ in range(2)))
    assert [where[4] for where in await ends_of(server, again)] == [[0]] * 2


@pytest.mark.usefixtures("patience")
async def test_heartbeats_list_frames_that_wait_in_a_series(server, start):
    await start(offer={"slots": 1, "cores": 1})
    tokens = await send_series(server, ("naps", 0.5), ("naps", 0.0), ("add", 2))
    await server.held(tokens[2])
    assert {*tokens} <= {token for first, n in server.beats()[-1].held for token in range(first, first + n)}
    await server.ended(tokens[0], 3)
    assert server.beats()[-1].series


@pytest.mark.usefixtures("patience")
async def test_frame_that_suspends_stops_its_range_until_it_has_ended(server, start):
    """All frames of a range are with the loop: the next one must not start beside one that waits."""
    await start(offer={"slots": 1, "cores": 1})
    tokens = await send_series(server, ("alone",), n=20)
    assert await ends_of(server, tokens) == [1] * 20


async def test_suspended_range_is_handed_back_while_a_frame_of_it_runs(server, start):
    await start(offer={"slots": 1, "cores": 1})
    tokens = await send_series(server, ("naps", 0.6), n=4)
    assert await ends_of(server, tokens[1:]) == [HANDED_BACK] * 3
    assert await ends_of(server, tokens[:1]) == [0.6]
    await asyncio.sleep(0)
    assert await server.run("nothing") is None


async def test_series_left_by_a_lost_session_runs_no_further(server, start, tmp_path):
    await start(offer={"slots": 1, "cores": 1})
    book = tmp_path / "book"
    tokens = await send_series(server, ("waits",), *(("records", str(book), at, 0.0) for at in range(3)))
    await server.began(tokens[0])
    [lost] = server.workers
    await server.publish_liveness(lost=[lost])
    await until(lambda: len(server.workers) == 2, what="a new session")
    assert await server.run("nothing") is None
    assert not book.exists()


@pytest.mark.usefixtures("patience")
async def test_frame_with_a_slot_of_its_own_does_not_wait_for_a_whole_series(server, start, tmp_path):
    """No frame of the series lets the event loop run."""
    await start(offer={"slots": 2, "cores": 2})
    book = tmp_path / "book"
    tokens = await send_series(server, ("records_busy", str(book), 0, 0.004), n=100)
    await until(book.exists, what="the first frame")
    alone = await server.send("records_busy", args=[str(book), 1, 0.0])
    assert await server.ended(alone) is None
    assert await ends_of(server, tokens) == [None] * 100
    lines = book.read_text().split()
    assert lines.index("+1") < len(lines) / 2
