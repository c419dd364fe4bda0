"""The tasks of `bench defaults`: declared as people declare them first, without any option."""

from __future__ import annotations

from rota.sdk import Rota


class Tasks:
    """The same tasks for the worker and for the process that submits."""

    def __init__(self, app: Rota) -> None:
        self.app = app
        self.run_async = app.task(name="run_async")(_run_async)
        self.run_sync = app.task(name="run_sync")(_run_sync)


async def _run_async(frame: int, scene: str) -> None:
    pass


def _run_sync(frame: int, scene: str) -> None:
    pass


app = Rota()
tasks = Tasks(app)
