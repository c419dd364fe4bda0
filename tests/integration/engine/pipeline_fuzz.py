"""Misbehaving tasks, loaded by `rota worker tests/integration/engine/pipeline_fuzz.py:app`."""

import asyncio
import os
import subprocess
import sys
import time

from rota import Rota

app = Rota()
LINE = "x" * 1023


@app.task(name="fine")
async def fine():
    return "fine"


@app.task(name="raises")
def raises():
    raise RuntimeError("out of luck")


@app.task(name="hangs")
def hangs():
    while True:
        time.sleep(1)


@app.task(name="hangs_async")
async def hangs_async():
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue


@app.task(name="forks")
def forks():
    if os.fork() == 0:
        return "from the child"
    return "from the parent"


@app.task(name="leaves_a_child")
def leaves_a_child():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)  # left by a frame"])
    time.sleep(3600)


@app.task(name="prints")
def prints():
    for _ in range(100 * 1024):
        print(LINE)
    return "printed"


@app.task(name="exits")
def exits():
    os._exit(3)


@app.task(name="exits_async")
async def exits_async():
    sys.exit(3)


@app.task(name="naps")
async def naps(seconds):
    await asyncio.sleep(seconds)


@app.task(name="ends_its_worker")
async def ends_its_worker():
    os._exit(3)


@app.task(name="kills_itself")
def kills_itself():
    os.kill(os.getpid(), 9)
