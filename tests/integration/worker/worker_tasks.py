"""An app with many kinds of tasks, good and bad; imported by the workers of tests and by their processes."""

import asyncio
import contextvars
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import rota
from rota import Cancelled, Fatal, Retry, Rota
from rota.worker.processes.main import WorkerChannel

app = Rota()
leftover = contextvars.ContextVar("leftover", default="")
finished = []
KINDS = {"value": ValueError, "fatal": Fatal, "exit": SystemExit, "interrupt": KeyboardInterrupt}


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@app.task
async def nothing():
    return None


@app.task
async def add(a, b=0):
    return a + b


@app.task
async def where():
    context = rota.context()
    return [str(context.job), str(context.layer), context.frame, context.attempt, list(context.gpus)]


@app.task
async def fails(kind, text, wait=False):
    if wait:
        await asyncio.sleep(0.001)
    raise KINDS[kind](text)


@app.task
async def unspeakable():
    raise Unspeakable


@app.task
async def later():
    raise Retry("busy", after=7.5)


@app.task
async def naps(seconds):
    await asyncio.sleep(seconds)
    return seconds


@app.task
def naps_sync(seconds):
    time.sleep(seconds)
    return seconds


@app.task
def add_sync(a, b=0):
    return a + b


@app.task
async def records(path, number, seconds):
    """Writes when it begins and ends."""
    _write(path, f"+{number}")
    await asyncio.sleep(seconds)
    _write(path, f"-{number}")
    return number


@app.task
async def records_busy(path, number, seconds):
    """The same, without letting others run in between."""
    _write(path, f"+{number}")
    time.sleep(seconds)  # noqa: ASYNC251 - that is what it is for
    _write(path, f"-{number}")


@app.task
def records_sync(path, number, seconds):
    _write(path, f"+{number}")
    time.sleep(seconds)
    _write(path, f"-{number}")
    return number


@app.task
def passes_gate(path, number, gate):
    """As `records_sync`; ends when another process has opened the FIFO `gate` for writing."""
    _write(path, f"+{number}")
    with Path(gate).open():
        pass
    _write(path, f"-{number}")
    return number


@app.task
def sees_cancel(path, number, gate):
    """Whether a stop was requested before the gate was opened."""
    passes_gate.function(path, number, gate)
    return rota.context().cancelled


@app.task
def exits_after_its_result():
    WorkerChannel.receive = lambda _channel: os._exit(3)


@app.task
def writes_to_descriptor(text):
    os.write(1, text.encode())


def _write(path, word):
    with Path(path).open("a") as book:
        book.write(f"{word} ")


at_once = 0


@app.task
async def alone():
    """How many frames of it run at once."""
    global at_once  # noqa: PLW0603
    at_once += 1
    try:
        await asyncio.sleep(0.001)
        return at_once
    finally:
        at_once -= 1


@app.task
async def waits():
    await asyncio.Event().wait()


@app.task
async def deaf():
    """Ignores cancellation for a while."""
    for _ in range(10):
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.1)
    finished.append("deaf")
    return "after all"


@app.task
async def tidies(path):
    try:
        await asyncio.Event().wait()
    finally:
        Path(path).write_text("tidied")


@app.task
async def appends(items):
    items.append(1)
    return len(items)


@app.task
async def expects_nothing_in(items):
    assert not items
    items.append(1)


@app.task
async def marks():
    seen = leftover.get()
    leftover.set("left behind")
    return seen


@app.task
async def times_out_inside():
    """Its own timeout, started in the first step, must cancel only this handler."""
    try:
        async with asyncio.timeout(0.05):
            await asyncio.Event().wait()
    except TimeoutError:
        return "in time"


@app.task
async def gathers():
    async with asyncio.TaskGroup() as tasks:
        naps = [tasks.create_task(asyncio.sleep(0.01, n)) for n in range(3)]
    return [nap.result() for nap in naps]


async def _exits(error):
    await asyncio.sleep(0)
    raise error


@app.task
async def exits_in_a_task(how, kind):
    """Starts a subtask that tries to end the process."""
    error = KINDS[kind](3)
    match how:
        case "group":
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_exits(error))
        case "gather":
            await asyncio.gather(_exits(error), asyncio.sleep(0.01))
        case "wait_for":
            await asyncio.wait_for(_exits(error), 5)
        case "first step":
            await asyncio.wait_for(_exits_at_once(error), 5)
        case "left alone":
            left = asyncio.create_task(_exits(error))
            await asyncio.wait([left])
            return str(left.exception())
    return None


async def _exits_at_once(error):
    raise error


@app.task
async def exits_in_a_callback(how, kind):
    """Leaves a loop callback behind that tries to end the process."""
    loop = asyncio.get_running_loop()
    left = loop.create_future()

    def exits(*_):
        left.cancel()
        raise KINDS[kind](3)

    match how:
        case "soon":
            loop.call_soon(exits)
        case "later":
            loop.call_later(0.01, exits)
        case "thread":
            await asyncio.to_thread(loop.call_soon_threadsafe, exits)
        case "done":
            future = loop.create_future()
            future.add_done_callback(exits)
            future.set_result(None)
        case "reader":
            ours, theirs = socket.socketpair()
            loop.add_reader(ours, lambda: (loop.remove_reader(ours), ours.close(), exits()))
            theirs.close()
    await asyncio.wait([left])
    return "called"


@app.task
async def cancels_its_task():
    """The first frame cancels its current task and ends; the others wait."""
    if rota.context().frame == 1:
        asyncio.current_task().cancel()
        return None
    await asyncio.sleep(0.01)
    return "untouched"


@app.task
async def leaves(files, value=None):
    _leave(files)
    return value


@app.task
async def leaves_later(files):
    await asyncio.sleep(0.01)
    _leave(files)


@app.task
def leaves_sync(files, value=None):
    _leave(files)
    return value


def _leave(files):
    """Write files by name and size in the frame directory; a negative size names a file without writing it."""
    context = rota.context()
    for name, size in files.items():
        path = context.folder / name
        if size >= 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x" * size)
        context.artifact(name)


@app.task
async def leaves_elsewhere(path, name):
    rota.context().artifact(path, name)


@app.task
async def opens_its_folder(fail):
    """Uses its directory and names no artifact."""
    folder = rota.context().folder
    (folder / "scratch").write_text("x")
    if fail:
        raise ValueError("no luck")
    return str(folder)


@app.task
async def large(size):
    return b"x" * size


@app.task
async def unencodable():
    return object()


@app.task
async def holds_the_loop(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


@app.task
async def forks():
    """Returns in both processes."""
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)  # noqa: ASYNC222 - it ends at once
    return pid != 0


@app.task
async def tells(percent):
    context = rota.context()
    context.progress(percent, "half way")
    context.log("a line")
    await asyncio.sleep(0.1)


@app.task
async def says():
    rota.context().log("at once")


@app.task
def sync_add(a, b=0):
    return a + b


@app.task
def sync_where():
    context = rota.context()
    return [context.frame, context.attempt, os.environ["ROTA_FRAME"], os.environ.get("COLOUR", ""), str(Path.cwd())]


@app.task
def sync_fails(kind, text):
    raise KINDS[kind](text)


@app.task
def sync_pid():
    return os.getpid()


@app.task
def prints(lines, wide=1):
    line = "x" * (wide - 1)
    for _ in range(lines):
        print(line)
    print("that was all")
    print("on stderr", file=sys.stderr)


@app.task
def exits(status):
    os._exit(status)


@app.task
def kills_itself():
    os.kill(os.getpid(), signal.SIGKILL)


@app.task
def sleeps(seconds):
    time.sleep(seconds)


@app.task
def looks_for_cancel():
    context = rota.context()
    while True:
        context.check()
        time.sleep(0.005)


@app.task
def notices_cancel(path):
    try:
        looks_for_cancel()
    except Cancelled:
        Path(path).write_text("noticed")
        raise


@app.task
def sync_forks():
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
    return pid != 0


@app.task
def leaves_a_child(path):
    child = subprocess.Popen(["sleep", "600"])
    Path(path).write_text(str(child.pid))
    time.sleep(600)


@app.task
def sync_large(size):
    return b"x" * size


@app.task
def sync_tells():
    context = rota.context()
    context.progress(25, "a quarter")
    context.log("from a process")
    time.sleep(0.1)


@app.task
def closes_stdout():
    sys.stdout.close()
    return "closed"


@app.task
async def deaf_for_ever():
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)


@app.task
async def yields():
    await asyncio.sleep(0)
