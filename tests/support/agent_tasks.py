"""An app with agents of every kind, loaded by name in other processes."""

import ctypes
import os
import time
from pathlib import Path

from rota import Cancelled, Rota

app = Rota()


class Forbidden(Exception):
    status_code = 403


@app.agent(every="1h")
def fine():
    print("all is well", flush=True)


@app.agent(every="1h")
def garbage():
    return open


@app.agent(every="1h")
def talks():
    for piece in ("one", " line", " in pieces\n", "and the rest"):
        os.write(1, piece.encode())
        time.sleep(0.01)


@app.agent(every="1h")
def told(run):
    Path(os.environ["TOLD"]).write_text(f"{run.name} {run.run} {run.slot_ms}")


@app.agent(every="1h")
def forbidden():
    raise RuntimeError("sync failed") from Forbidden("no")


@app.classify_failure
def kind(error):
    return "THROTTLED" if isinstance(error, KeyError) else None


@app.agent(every="1h")
def odd():
    raise KeyError("quota")


@app.agent(every="1h")
def slow():
    Path(os.environ["BEGAN"]).write_text(str(os.getpid()))
    time.sleep(60)


@app.agent(every="1h")
def deaf():
    Path(os.environ["BEGAN"]).write_text(str(os.getpid()))
    while True:
        try:
            time.sleep(60)
        except Cancelled:
            continue


@app.agent(every="1h")
def greedy():
    """Holds the GIL, so that no other thread of its process runs."""
    Path(os.environ["BEGAN"]).write_text(str(os.getpid()))
    ctypes.PyDLL(None).sleep(60)


@app.agent(every="1h")
def gone():
    os._exit(3)


@app.agent(every="1h")
async def on_the_loop():
    return object()


@app.agent(every="1h", name="hourly")
@app.task(name="report")
async def report(day=None):
    return day
