"""What the worker of `bench e2e` runs."""

from __future__ import annotations

import asyncio

from bench.contenders.marks import mark
from rota.sdk import Rota

app = Rota()


@app.task(topic="bench")
async def noop(**_body: object) -> None:
    pass


@app.task(topic="bench")
async def stamp(number: int) -> None:
    """Say when it ran."""
    mark(number)


@app.task(topic="bench")
async def suspends(**_body: object) -> None:
    await asyncio.sleep(0)


@app.task(topic="bench")
async def returns(scene: str, frame: int) -> dict[str, object]:
    return {"scene": scene, "frame": frame}


@app.task(topic="bench")
def plain(**_body: object) -> None:
    pass
