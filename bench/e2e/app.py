"""What the worker of `bench e2e` runs."""

from __future__ import annotations

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
