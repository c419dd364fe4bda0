"""The process pool of tasks and agents: starts, requests, stops, and what is left after a death."""

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import structlog

from rota.worker.processes import child as child_module
from rota.worker.processes.child import ProcessStartFailed
from rota.worker.processes.group_guard import ProcessGroupGuard
from rota.worker.processes.ipc import encode_message
from rota.worker.processes.request_queue import REQUEST_BYTES_MAX
from tests.integration.worker.pool_child import PoolReply, PoolRequest
from tests.integration.worker.pool_support import APP, create_pool
from tests.integration.worker.worker_support import alive, processes_of
from tests.support.waiting import until

OVER_ANY_PIPE_BUFFER = 8 * 1024 * 1024


@pytest.fixture
async def pool():
    before = set(processes_of())
    made = create_pool()
    yield made
    await made.close()
    assert set(processes_of()) <= before, "processes were left behind"


def app_in(folder, code, **more):
    (folder / "app.py").write_text(code)
    return create_pool("app.py", folder, **more)


GATED_APP = """
import os, time
from pathlib import Path
from rota import Rota

folder = Path(__file__).parent
app = Rota()
(folder / f"starting-{os.getpid()}").touch()
while not (folder / "gate").exists():
    time.sleep(0.005)
"""


def started_in(folder):
    return len(list(folder.glob("starting-*")))


async def reply_to(child, *request):
    await child.send(PoolRequest(*request))
    return await child.messages.get()


async def test_released_process_is_reused_and_surplus_ones_are_closed(pool):
    children = [await pool.acquire() for _ in range(3)]
    for child in children:
        await pool.release(child)
    assert pool.idle == tuple(children[:2])
    assert [child.alive for child in children] == [True, True, False]
    assert await pool.acquire() is children[1]
    assert await reply_to(children[1], "pid") == PoolReply(str(children[1].process.pid).encode())
    await children[1].close()


@pytest.mark.parametrize(
    ("code", "status"), [("import os\nos._exit(7)", 7), ("import os\nos.kill(os.getpid(), 9)", -9)]
)
async def test_child_that_dies_before_its_handshake_fails_the_start(tmp_path, code, status):
    broken = app_in(tmp_path, code)
    before = set(processes_of())
    for _ in range(2):
        with pytest.raises(ProcessStartFailed) as failed:
            await broken.acquire()
        assert (failed.value.problem, failed.value.status) == ("", status)
    assert broken.idle == ()
    await broken.close()
    assert set(processes_of()) <= before


async def test_unloadable_app_fails_the_start_with_its_reason(tmp_path):
    pool = app_in(tmp_path, "nonsense")
    with pytest.raises(ProcessStartFailed, match="NameError") as failed:
        await pool.acquire()
    assert failed.value.status is None
    await pool.close()


async def test_child_that_never_becomes_ready_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(child_module, "START_TIMEOUT_S", 0.2)
    before = set(processes_of())
    pool = app_in(tmp_path, "import time\ntime.sleep(60)")
    with pytest.raises(TimeoutError, match=r"did not load the app within 0\.2 s"):
        await pool.acquire()
    await pool.close()
    assert set(processes_of()) <= before


async def test_child_that_cannot_be_executed_fails_the_start_and_leaks_no_descriptor(tmp_path):
    descriptors = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(FileNotFoundError):
        await create_pool(APP, tmp_path / "gone").acquire()
    assert set(Path("/proc/self/fd").iterdir()) <= descriptors


async def test_reply_larger_than_the_pipe_buffer_arrives_whole(pool):
    child = await pool.acquire()
    data = os.urandom(OVER_ANY_PIPE_BUFFER)
    assert await reply_to(child, "echo", data) == PoolReply(data)
    assert await reply_to(child, "echo", b"next") == PoolReply(b"next")
    await pool.release(child)


@pytest.mark.parametrize("over", [-1, 0, 1])
async def test_request_as_large_as_a_packet_arrives_whole(pool, over):
    child = await pool.acquire()
    empty = len(encode_message(PoolRequest("echo", bytes(1000)))) - 1000
    data = os.urandom(REQUEST_BYTES_MAX - empty + over)
    for _ in range(2):
        assert await reply_to(child, "echo", data) == PoolReply(data)
    await pool.release(child)


async def test_requests_are_taken_back_from_a_child_that_is_busy(pool):
    child = await pool.acquire()
    await child.send(PoolRequest("ignore SIGTERM"))
    assert await child.messages.get() == PoolReply(b"ignoring")
    echo = encode_message(PoolRequest("echo", b"x"))
    assert [child._requests.put(echo) for _ in range(3)] == [True] * 3
    assert [child._requests.take_back() for _ in range(2)] == [3, 0]
    await child.close()


async def test_request_queue_that_is_full_takes_no_other_request_until_it_was_emptied(pool):
    child = await pool.acquire()
    await child.send(PoolRequest("ignore SIGTERM"))
    assert await child.messages.get() == PoolReply(b"ignoring")
    request, room = bytes(REQUEST_BYTES_MAX), 0
    while child._requests.put(request):
        room += 1
    assert child._requests.take_back() == room > 1
    assert child._requests.put(request)
    await child.close()


@pytest.mark.parametrize("busy_s", [0.0, 0.0002])
async def test_request_is_either_taken_or_taken_back(pool, busy_s):
    """Taken back while the child takes requests as fast as it can."""
    child = await pool.acquire()
    request = encode_message(PoolRequest("sleep", str(busy_s).encode()))
    sent = back = replies = 0
    for round_ in range(200):
        sent += sum(child._requests.put(request) for _ in range(20))
        for _ in range(round_ % 5):
            replies += await child.messages.get() is not None
        back += child._requests.take_back()
    assert back < sent
    async with asyncio.timeout(10):
        while replies < sent - back:
            replies += await child.messages.get() is not None
    assert await reply_to(child, "echo", b"last") == PoolReply(b"last")
    await pool.release(child)


async def test_child_killed_in_the_middle_of_a_reply_never_sent_it(pool):
    child = await pool.acquire()
    assert await reply_to(child, "die in the middle of a reply", os.urandom(OVER_ANY_PIPE_BUFFER)) is None
    assert child.process.status == -signal.SIGKILL
    await pool.release(child)
    assert pool.idle == ()
    other = await pool.acquire()
    assert await reply_to(other, "echo", b"fine") == PoolReply(b"fine")
    await pool.release(other)


async def test_oversized_reply_kills_its_process():
    pool = create_pool(bytes_max=1000)
    child = await pool.acquire()
    with structlog.testing.capture_logs() as logs:
        assert await reply_to(child, "echo", b"x" * 2000) is None
    assert [line["event"] for line in logs] == ["decode_failed"]
    await child.close()
    await pool.close()


async def test_request_to_a_dead_process_ends_without_a_reply(pool):
    child = await pool.acquire()
    os.kill(child.process.pid, signal.SIGKILL)
    assert await reply_to(child, "echo", os.urandom(OVER_ANY_PIPE_BUFFER)) is None
    await child.close()


async def test_idle_process_that_died_is_replaced(pool):
    child = await pool.acquire()
    await pool.release(child)
    os.kill(child.process.pid, signal.SIGKILL)
    await child.process.ended.wait()
    other = await pool.acquire()
    assert other is not child
    await pool.release(other)


async def test_killed_process_is_not_reused_even_before_it_has_ended(pool):
    child = await pool.acquire()
    child.kill()
    await pool.release(child)
    assert pool.idle == ()


async def test_child_that_ignores_sigterm_is_killed(pool):
    child = await pool.acquire()
    assert await reply_to(child, "ignore SIGTERM") == PoolReply(b"ignoring")
    await child.stop(kill_after_s=0.1)
    assert child.process.status == -signal.SIGKILL


async def test_child_that_obeys_sigterm_is_not_waited_for(pool):
    child = await pool.acquire()
    await child.stop(kill_after_s=60)
    assert child.process.status == -signal.SIGTERM


async def test_closed_process_takes_its_descendants_with_it(pool):
    child = await pool.acquire()
    await child.send(PoolRequest("fork"))
    [descendant] = await until(lambda: processes_of(child.process.pid))
    await child.close()
    await until(lambda: not alive(descendant))


async def test_cancelled_acquisition_leaves_no_process(tmp_path):
    before = set(processes_of())
    pool = app_in(tmp_path, "import time\ntime.sleep(60)")
    starting = asyncio.create_task(pool.acquire())
    await until(lambda: set(processes_of()) - before)
    starting.cancel()
    await asyncio.wait([starting])
    await pool.close()
    assert set(processes_of()) <= before


async def test_start_whose_caller_gave_up_serves_the_next_caller(tmp_path):
    pool = app_in(tmp_path, GATED_APP)
    first = asyncio.create_task(pool.acquire())
    await until(lambda: started_in(tmp_path) == 1, within_s=20)
    first.cancel()
    await asyncio.wait([first])
    second = asyncio.create_task(pool.acquire())
    (tmp_path / "gate").touch()
    await pool.release(await second)
    assert started_in(tmp_path) == len(pool.idle) == 1
    await pool.close()


async def test_no_more_than_starts_max_processes_start_at_once(tmp_path):
    pool = app_in(tmp_path, GATED_APP, starts_max=2)
    callers = [asyncio.create_task(pool.acquire()) for _ in range(5)]
    await until(lambda: started_in(tmp_path) == 2, within_s=20)
    assert len(pool._starts) == 2
    (tmp_path / "gate").touch()
    children = [await caller for caller in callers]
    assert len(set(children)) == started_in(tmp_path) == 5
    for child in children:
        await child.close()
    await pool.close()


async def test_released_process_serves_a_caller_that_waits_for_a_start(tmp_path):
    pool = app_in(tmp_path, GATED_APP)
    (tmp_path / "gate").touch()
    child = await pool.acquire()
    (tmp_path / "gate").unlink()
    waiting = asyncio.create_task(pool.acquire())
    await until(lambda: started_in(tmp_path) == 2, within_s=20)
    await pool.release(child)
    assert await waiting is child
    await child.close()
    await pool.close()


async def test_failed_start_fails_one_caller_and_the_next_start_serves_the_other(tmp_path):
    fails_once = (
        "import os\nfrom pathlib import Path\nif not Path('failed').exists(): Path('failed').touch(); os._exit(7)\n"
    )
    pool = app_in(tmp_path, fails_once + GATED_APP, starts_max=1)
    (tmp_path / "gate").touch()
    callers = [asyncio.create_task(pool.acquire()) for _ in range(2)]
    first, second = await asyncio.gather(*callers, return_exceptions=True)
    assert isinstance(first, ProcessStartFailed)
    await pool.release(second)
    await pool.close()


async def test_caller_cancelled_when_it_gets_a_process_returns_it(pool):
    child = await pool.acquire()
    waiting = asyncio.create_task(pool.acquire())
    await until(lambda: pool._starts)
    await pool.release(child)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert child in pool.idle


async def test_guard_that_was_killed_is_replaced_and_knows_every_group():
    guard, before = ProcessGroupGuard(), set(processes_of())
    groups = [await asyncio.create_subprocess_exec("sleep", "600", start_new_session=True) for _ in range(2)]
    try:
        guard.add(groups[0].pid)
        os.kill(guard.pid, signal.SIGKILL)
        await until(lambda: not alive(guard.pid), what="the end of the guard")
        guard.add(groups[1].pid)
        # As the end of the worker: its end of the pipe is closed.
        guard._killer.stdin.close()
        assert [await group.wait() for group in groups] == [-signal.SIGKILL] * 2
    finally:
        await guard.close()
        for group in groups:
            with suppress(ProcessLookupError):
                group.kill()
    assert set(processes_of()) <= before


async def test_closed_guard_kills_nothing():
    guard = ProcessGroupGuard()
    group = await asyncio.create_subprocess_exec("sleep", "600", start_new_session=True)
    guard.add(group.pid)
    await guard.close()
    assert alive(group.pid)
    group.kill()
    await group.wait()


async def test_killed_worker_leaves_no_child(spawn, tmp_path):
    parent = await spawn("tests.integration.worker.pool_parent", tmp_path)
    pids = [int(pid) for pid in (await parent.line(30)).split()]
    assert [alive(pid) for pid in pids] == [True, True, True]
    parent.kill()
    await until(lambda: not any(map(alive, pids)), what="the end of its children")
