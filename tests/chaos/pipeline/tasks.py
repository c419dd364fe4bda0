"""Tasks that record their own runs: a line at the start and one at the end (or before an error), in a file per worker.

Loaded by `rota worker tests/chaos/pipeline/tasks.py:app`; RUNS is the directory of the files. A line is written by one
system call, so a killed process leaves no partial line.
"""

import asyncio
import os
import time

import msgspec

from rota import Fatal, Retry, Rota, context

app = Rota()
FOLDER = os.environ.get("RUNS", ".")
NAME = os.environ.get("WORKER_NAME", "")


def note(what):
    now = context()
    line = [what, str(now.job), str(now.layer), now.frame, now.attempt, now._token, NAME, time.monotonic()]
    file = os.open(f"{FOLDER}/{NAME}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, msgspec.json.encode(line) + b"\n")
    finally:
        os.close(file)


@app.task(name="noop")
async def noop(*_args):
    note("began")
    note("ended")


@app.task(name="nap")
async def nap(seconds, *_more):
    note("began")
    await asyncio.sleep(seconds)
    note("ended")


@app.task(name="nap-or-die")
async def nap_or_die(frame):
    """Its worker ends with the given frame."""
    note("began")
    await asyncio.sleep(0.002)
    if context().frame == frame:
        os._exit(13)
    note("ended")


@app.task(name="value")
async def value(number):
    note("began")
    note("ended")
    return {"number": number, "frame": context().frame}


@app.task(name="boom")
async def boom():
    note("began")
    note("raised")
    raise ValueError("no luck")


@app.task(name="fatal")
async def fatal():
    note("began")
    note("raised")
    raise Fatal("never")


@app.task(name="flaky")
async def flaky(fails):
    note("began")
    if context().attempt <= fails:
        note("raised")
        raise Retry("again", after=0.05)
    note("ended")


@app.task(name="crunch")
def crunch(seconds):
    """A sync task, so it runs in a separate process."""
    note("began")
    time.sleep(seconds)
    note("ended")
