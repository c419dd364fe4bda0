"""The tasks of the pipeline tests, and an agent that records its runs in the folder `agents` beside theirs."""

import asyncio
import os
import time
from pathlib import Path

import msgspec

from tests.chaos.pipeline.tasks import FOLDER, NAME, app

__all__ = ["app"]
AGENTS = Path(FOLDER) / "agents"


def _note(what, run):
    AGENTS.mkdir(exist_ok=True)
    file = os.open(AGENTS / f"{NAME}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, msgspec.json.encode([what, run.name, str(run.run), NAME, time.monotonic()]) + b"\n")
    finally:
        os.close(file)


@app.agent(every="1s", timeout="30s", name="tick")
async def tick(run):
    _note("began", run)
    await asyncio.sleep(0.1)
    _note("ended", run)
