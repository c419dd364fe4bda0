"""Sync frames in series: sent to their process before it needs them, and taken back while they have not started."""

import asyncio
import os
import select
import signal
from pathlib import Path

import msgspec
import pytest

from rota.model.protocol import AttemptStatus
from rota.worker.data.blob_store import FileStore
from rota.worker.processes.request_queue import REQUEST_BYTES_MAX
from rota.worker.runners import task_process
from tests.integration.worker.series_support import HANDED_BACK, ends_of, recall, send_series
from tests.integration.worker.worker_support import alive, processes_of, serving, task, tokens_of, workers
from tests.support.waiting import until

KILLED = (AttemptStatus.FAILED, "signal")
CANCELLED = (AttemptStatus.CANCELLED, "cancelled")
WITHIN_S = 10.0
OVER_A_PACKET = "x" * REQUEST_BYTES_MAX


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """Series are handed back on request only."""
    monkeypatch.setattr("rota.worker.frame_table.HAND_BACK_AFTER_S", 3600.0)


@pytest.fixture
async def server(nats_url, bus_prefix):
    async with serving(nats_url, bus_prefix) as running:
        yield running


@pytest.fixture
async def start(nats_url, bus_prefix, server, tmp_path):
    before, failures = set(processes_of()), []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: failures.append(context))
    async with workers(nats_url, bus_prefix, server, tmp_path) as factory:
        yield factory
    assert set(processes_of()) <= before, "processes were left behind"
    assert failures == [], "a callback of the worker failed"


class Gated:
    """Series whose first frame runs until the gate is opened, and what its frames have noted."""

    def __init__(self, server, folder):
        self.server = server
        self.book = folder / "book"
        self.gate = folder / "gate"
        self.gate_behind = folder / "gate_behind"
        """For a frame behind the first: it may come while the first gate is still open."""
        for gate in (self.gate, self.gate_behind):
            os.mkfifo(gate)

    def record(self, number):
        return "records_sync", str(self.book), number, 0.0

    async def send(self, *behind):
        """Returns the tokens when the first frame runs, and all others are in the queue of its process."""
        tokens = await send_series(self.server, ("passes_gate", str(self.book), 0, str(self.gate)), *behind)
        await self.server.began(tokens[0])
        await self.server.held(tokens[-1])
        return tokens

    async def open(self, gate=None):
        await until(lambda: self.try_open(gate), what="a frame at the gate")

    def try_open(self, gate=None):
        try:
            os.close(os.open(gate or self.gate, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            return False  # nothing reads it yet
        return True

    @property
    def notes(self):
        return self.book.read_text().split()


@pytest.fixture
async def gated(server, tmp_path):
    return Gated(server, tmp_path)


async def stop(pid):
    """The signal may arrive in the middle of a system call that takes a request."""
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T", what="its stop")


async def process_of(server):
    """The process of a worker that has one."""
    end = await server.run("sync_pid")
    return msgspec.msgpack.decode(end.value)


async def test_process_runs_a_series_while_the_loop_of_its_worker_is_blocked(server, start, gated, tmp_path):
    """The worker of this test shares its event loop."""
    await start(processes=1)
    notes = tmp_path / "notes"
    os.mkfifo(notes)
    reader = os.open(notes, os.O_RDWR | os.O_NONBLOCK)  # for both, so that it has no end between two frames
    count = 20
    tokens = await gated.send(*(("records_sync", str(notes), at, 0.0) for at in range(count)))
    await gated.open()
    read = b""
    while read.count(b"-") < count and select.select([reader], [], [], WITHIN_S)[0]:
        read += os.read(reader, 4096)
    os.close(reader)
    assert read.split() == [word.encode() for at in range(count) for word in (f"+{at}", f"-{at}")]
    assert await ends_of(server, tokens) == [0, *range(count)]


async def test_recalled_frames_in_the_queue_do_not_run(server, start, gated):
    await start(processes=1)
    tokens = await gated.send(*(gated.record(at) for at in range(1, 40)))
    await recall(server, (tokens[0], len(tokens)))
    assert await ends_of(server, tokens[1:]) == [HANDED_BACK] * 39
    await gated.open()
    assert await ends_of(server, tokens[:1]) == [0]
    assert gated.notes == ["+0", "-0"]
    assert await process_of(server)


async def test_frames_of_a_stopped_process_are_handed_back(server, start, gated):
    await start(processes=1)
    pid = await process_of(server)
    tokens = await gated.send(*(gated.record(at) for at in range(1, 10)))
    await stop(pid)
    await recall(server, (tokens[0], len(tokens)))
    assert await ends_of(server, tokens[1:]) == [HANDED_BACK] * 9
    os.kill(pid, signal.SIGCONT)
    await gated.open()
    assert await ends_of(server, tokens[:1]) == [0]
    assert gated.notes == ["+0", "-0"]


async def test_draining_worker_hands_back_frames_in_the_queue(server, start, gated):
    worker = await start(processes=1)
    tokens = await gated.send(*(gated.record(at) for at in range(1, 10)))
    worker._draining.set()
    assert await ends_of(server, tokens[1:]) == [HANDED_BACK] * 9
    await gated.open()
    await worker.drain()
    assert await ends_of(server, tokens[:1]) == [0]
    assert gated.notes == ["+0", "-0"]


async def test_cancelled_frame_in_the_queue_does_not_run_and_the_others_do(server, start, gated):
    await start(processes=1)
    tokens = await gated.send(*(gated.record(at) for at in range(1, 6)))
    await server.cancel(tokens[2])
    assert await ends_of(server, tokens[2:3]) == [CANCELLED]
    await server.held(tokens[5])
    await gated.open()
    assert await ends_of(server, tokens) == [0, 1, CANCELLED, 3, 4, 5]
    assert [note for note in gated.notes if note[0] == "+"] == ["+0", "+1", "+3", "+4", "+5"]


async def test_cancel_of_the_running_frame_stops_no_frame_behind_it(server, start, tmp_path):
    await start(processes=1)
    pid = await process_of(server)
    polls = task("notices_cancel", kill_after_s=60)
    tokens = await send_series(server, (polls, str(tmp_path / "note")), ("sync_add", 1), ("sync_pid",))
    await server.began(tokens[0])
    await server.cancel(tokens[0])
    assert await ends_of(server, tokens) == [CANCELLED, 1, pid]


async def test_frame_that_ignores_its_cancel_is_killed_and_those_behind_it_run(server, start, gated):
    await start(processes=1)
    pid = await process_of(server)
    deaf = task("passes_gate", kill_after_s=0.05)
    tokens = await send_series(
        server, (deaf, str(gated.book), 0, str(gated.gate)), *(gated.record(at) for at in range(1, 6))
    )
    await server.began(tokens[0])
    await server.cancel(tokens[0])
    assert await ends_of(server, tokens) == [CANCELLED, 1, 2, 3, 4, 5]
    assert not alive(pid)
    assert gated.notes.count("+1") == 1


async def test_killed_process_fails_only_the_frame_that_it_ran(server, start, gated):
    await start(processes=1)
    pid = await process_of(server)
    tokens = await gated.send(*(gated.record(at) for at in range(1, 40)))
    os.kill(pid, signal.SIGKILL)
    assert await ends_of(server, tokens) == [KILLED, *range(1, 40)]
    assert gated.notes == ["+0", *(word for at in range(1, 40) for word in (f"+{at}", f"-{at}"))]
    assert server.twice == []


async def test_process_that_is_killed_by_frames_of_a_series_fails_only_these(server, start):
    await start(processes=1)
    frames = [("kills_itself",) if at % 3 == 1 else ("sync_add", at) for at in range(9)]
    tokens = await send_series(server, *frames)
    assert await ends_of(server, tokens) == [KILLED if at % 3 == 1 else at for at in range(9)]
    assert server.twice == []


async def test_process_killed_before_it_takes_a_frame_fails_none(server, start):
    await start(processes=1)
    pid = await process_of(server)
    await stop(pid)
    tokens = await send_series(server, ("sync_pid",), ("sync_add", 1))
    await server.began(tokens[0])
    os.kill(pid, signal.SIGKILL)
    other, one = await ends_of(server, tokens)
    assert other not in (pid, KILLED)
    assert one == 1


async def test_frame_that_was_sent_to_a_stopped_process_runs_when_it_goes_on(server, start):
    """It counts as started, so it is not handed back with those behind it."""
    await start(processes=1)
    pid = await process_of(server)
    await stop(pid)
    tokens = await send_series(server, ("sync_pid",), ("sync_add", 1))
    await server.began(tokens[0])
    await recall(server, (tokens[0], 2))
    assert await ends_of(server, tokens[1:]) == [HANDED_BACK]
    os.kill(pid, signal.SIGCONT)
    assert await ends_of(server, tokens[:1]) == [pid]


async def test_frame_fails_if_its_new_process_ends_before_taking_it(server, start, tmp_path):
    """Another process would do the same."""
    (tmp_path / "app.py").write_text(
        "import os\n"
        "from rota import Rota\n"
        "from rota.worker.processes.main import WorkerChannel\n"
        "WorkerChannel.receive = lambda channel: os._exit(3)\n"
        "app = Rota()\n"
    )
    await start(app=str(tmp_path / "app.py"), processes=1)
    tokens = await send_series(server, ("sync_add", 1), ("sync_add", 2))
    assert await ends_of(server, tokens) == [(AttemptStatus.FAILED, "exit_status")] * 2


async def test_frame_cancelled_while_it_waits_for_another_process_ends_at_once(server, start):
    await start(processes=1)
    pid = await process_of(server)
    await stop(pid)
    token = await server.send(task("sync_add", kill_after_s=3600), 2, args=[1])
    await server.began(token)
    await server.cancel(token, 2)
    assert await ends_of(server, [token + 1]) == [CANCELLED]
    os.kill(pid, signal.SIGKILL)
    assert await ends_of(server, [token]) == [CANCELLED]
    assert await process_of(server) != pid


async def test_output_of_each_frame_of_a_series_is_complete_in_its_own_log(server, start):
    await start(processes=1)
    frames = [("sync_add", at) if at % 3 == 2 else ("writes_to_descriptor", f"frame {at}") for at in range(60)]
    tokens = await send_series(server, *frames)
    await server.ended(tokens[0], len(tokens))
    for at, token in enumerate(tokens):
        if at % 3 != 2:
            assert (await server.logged(token))[0] == f"frame {at}".encode()
    assert {chunk.token for chunk in server.chunks} == {token for at, token in enumerate(tokens) if at % 3 != 2}


@pytest.mark.parametrize("quiet", [1, 5, 30])
async def test_output_after_quiet_frames_is_not_taken_for_theirs(server, start, quiet):
    await start(processes=1)
    frames = [("writes_to_descriptor", "loud") if at % (quiet + 1) == quiet else ("sync_add", at) for at in range(124)]
    tokens = await send_series(server, *frames)
    await server.ended(tokens[0], len(tokens))
    loud = {token for token, (name, *_) in zip(tokens, frames, strict=True) if name == "writes_to_descriptor"}
    for token in loud:
        assert (await server.logged(token))[0] == b"loud"
    assert {chunk.token for chunk in server.chunks} == loud


async def test_large_values_and_artifacts_of_a_series_are_stored_before_the_next_frame_begins(server, start, tmp_path):
    store = FileStore(tmp_path / "store", most_bytes=1_000_000)
    await start(processes=1, store=store, offer={"slots": 1, "cores": 1})
    tokens = await send_series(
        server,
        ("sync_add", 1),
        ("sync_large", 100_000),
        ("sync_add", 2),
        ("leaves_sync", {"a": 10}),
        (task("leaves_sync", artifacts=("b",)), {"b": 20}),
        ("sync_add", 3),
    )
    ends = await server.ended(tokens[0], len(tokens))
    assert [len(end.artifacts) for end in ends] == [0, 0, 0, 1, 1, 0]
    assert msgspec.msgpack.decode(store.get(ends[1].pointer)) == b"x" * 100_000
    assert await ends_of(server, tokens[-1:]) == [3]


async def test_frame_in_a_series_that_leaves_no_declared_artifact_fails(server, start, gated):
    await start(processes=1)
    tokens = await gated.send(("sync_add", 1), (task("sync_add", artifacts=("b",)), 2), ("sync_add", 3))
    await gated.open()
    assert await ends_of(server, tokens) == [0, 1, (AttemptStatus.FAILED, "artifact_missing"), 3]


async def test_progress_and_logs_are_those_of_the_frame_in_the_queue_that_sent_them(server, start):
    await start(processes=1)
    tokens = await send_series(server, ("sync_add", 1), ("sync_add", 2), ("sync_tells",), ("sync_add", 3))
    assert await ends_of(server, tokens) == [1, 2, None, 3]
    assert await server.logged(tokens[2], "log") == (b"from a process\n", 0)
    assert {token for update in server.progress for token in update.percent} == {tokens[2]}


async def test_frame_with_a_large_request_runs_in_its_turn(server, start):
    await start(processes=1)
    given = [1, 2, OVER_A_PACKET, 3, OVER_A_PACKET, OVER_A_PACKET, 4]
    tokens = await send_series(server, *(("sync_add", each, each) for each in given))
    assert await ends_of(server, tokens) == [each + each for each in given]


async def test_series_of_several_kinds_of_tasks_runs_in_order(server, start, gated):
    await start(processes=1, offer={"slots": 1, "cores": 1})
    kinds = ["records_sync", "records", "records_sync", "records", "records_sync", "records_sync"]
    tokens = await gated.send(*((kind, str(gated.book), at, 0.0) for at, kind in enumerate(kinds, 1)))
    await gated.open()
    assert await ends_of(server, tokens) == list(range(7))
    assert gated.notes == [word for at in range(7) for word in (f"+{at}", f"-{at}")]


async def test_timeout_of_a_frame_begins_when_its_process_takes_it(server, start):
    await start(processes=1)
    limited = {"timeout_s": 0.2, "kill_after_s": 0.05}
    tokens = await send_series(
        server,
        ("naps_sync", 0.4),
        (task("naps_sync", **limited), 0.05),
        (task("naps_sync", **limited), 60),
        ("sync_add", 1),
    )
    assert await ends_of(server, tokens) == [0.4, 0.05, (AttemptStatus.TIMEOUT, "timeout"), 1]


async def test_heartbeats_list_frames_in_the_queue(server, start, gated):
    await start(processes=1)
    tokens = await gated.send(*(gated.record(at) for at in range(1, 200)))
    for beat in server.beats()[-1:]:
        assert set(tokens) <= tokens_of(beat.held)
    await gated.open()
    assert await ends_of(server, tokens) == list(range(200))


async def test_frame_alone_does_not_wait_for_the_frames_in_the_queue(server, start, gated):
    """There is one process: a series gives it up after the running frame, as others do."""
    await start(processes=1, offer={"slots": 2, "cores": 2})
    tokens = await gated.send(*(gated.record(at) for at in range(1, 40)))
    alone = await server.send("records_sync", args=[str(gated.book), 99, 0.0])
    await server.held(alone)
    await gated.open()
    assert await ends_of(server, tokens) == list(range(40))
    assert await ends_of(server, [alone]) == [99]
    assert gated.notes[:4] == ["+0", "-0", "+99", "-99"]


@pytest.fixture
def reads_late(monkeypatch):
    """While frames are in the queue, messages are read when something requires it only."""
    monkeypatch.setattr(task_process, "READ_INTERVAL_S", 3600.0)


@pytest.mark.usefixtures("reads_late")
async def test_process_that_runs_dry_wakes_its_worker(server, start):
    await start(processes=1)
    tokens = await send_series(server, *(("sync_add", at) for at in range(200)))
    assert await ends_of(server, tokens) == list(range(200))


@pytest.mark.usefixtures("reads_late")
async def test_late_cancel_of_a_frame_that_has_ended_stops_no_other(server, start, gated):
    await start(processes=1)
    at_gate = str(gated.book), 1, str(gated.gate_behind)
    tokens = await gated.send(("sees_cancel", *at_gate), ("sync_add", 2))
    await gated.open()
    await until(lambda: "+1" in gated.notes, what="the second frame")
    await server.cancel(tokens[0])
    assert await ends_of(server, tokens[:1]) == [0]
    await gated.open(gated.gate_behind)
    assert await ends_of(server, tokens[1:]) == [False, 2]


@pytest.mark.usefixtures("reads_late")
async def test_killed_process_fails_the_frame_that_it_ran_if_results_before_it_were_not_read(server, start, gated):
    await start(processes=1)
    pid = await process_of(server)
    at_gate = str(gated.book), 2, str(gated.gate_behind)
    tokens = await gated.send(gated.record(1), ("passes_gate", *at_gate), ("sync_add", 3))
    await gated.open()
    await until(lambda: "+2" in gated.notes, what="the last frame that runs")
    os.kill(pid, signal.SIGKILL)
    assert await ends_of(server, tokens) == [0, 1, KILLED, 3]


async def test_process_that_exits_between_frames_fails_none(server, start, gated, monkeypatch):
    # Later than usual, but once: a new process that waits for its next frame does not tell when it runs dry.
    monkeypatch.setattr(task_process, "READ_INTERVAL_S", 0.3)
    await start(processes=1)
    tokens = await gated.send(("exits_after_its_result",), ("sync_add", 1), ("sync_add", 2))
    await gated.open()
    assert await ends_of(server, tokens) == [0, None, 1, 2]


async def test_forking_frames_of_a_series_report_once(server, start):
    await start(processes=1)
    tokens = await send_series(server, *(("sync_forks",) for _ in range(5)), ("sync_add", 1))
    assert await ends_of(server, tokens) == [True] * 5 + [1]
    assert server.twice == []


@pytest.mark.parametrize("pauses_s", [0.0, 0.0005, 0.002])
async def test_frame_that_is_handed_back_at_any_moment_has_not_run_and_others_have(server, start, gated, pauses_s):
    await start(processes=1)
    for at in range(0, 500, 100):
        numbers = range(at, at + 100)
        tokens = await send_series(server, *(("records_sync", str(gated.book), each, pauses_s) for each in numbers))
        await until(lambda: gated.book.exists() and f"+{at}" in gated.notes, what="a frame", every_s=0.0)  # noqa: B023
        await recall(server, (tokens[0], len(tokens)))
        ends = await ends_of(server, tokens)
        ran = [number for number, end in zip(numbers, ends, strict=True) if end != HANDED_BACK]
        assert ran == [end for end in ends if end != HANDED_BACK]
        assert gated.notes[-2 * len(ran) :] == [word for number in ran for word in (f"+{number}", f"-{number}")]
    assert server.twice == []


@pytest.mark.parametrize("pauses_s", [0.0, 0.0005])
async def test_process_killed_at_any_moment_fails_one_frame_at_most(server, start, gated, pauses_s):
    await start(processes=1)
    for at in range(0, 300, 100):
        pid = await process_of(server)
        numbers = range(at, at + 100)
        tokens = await send_series(server, *(("records_sync", str(gated.book), each, pauses_s) for each in numbers))
        await until(lambda: gated.book.exists() and f"+{at}" in gated.notes, what="a frame", every_s=0.0)  # noqa: B023
        os.kill(pid, signal.SIGKILL)
        ends = await ends_of(server, tokens)
        assert ends.count(KILLED) <= 1
        assert [end for end in ends if end != KILLED] == [
            number for number, end in zip(numbers, ends, strict=True) if end != KILLED
        ]
    begun = [note for note in gated.notes if note[0] == "+"]
    assert len(begun) == len(set(begun)), "a frame ran twice"
    assert server.twice == []
