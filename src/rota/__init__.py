"""Rota: a distributed job scheduler that keeps exact books.

    from rota import Rota

    app = Rota()

    @app.task(cores=2)
    async def render(scene: str) -> None: ...

Nothing of it is loaded before it is asked for, so that `import rota` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rota.sdk import Cancelled, Context, Fatal, Retry, Rota, Task, context

__all__ = ["Cancelled", "Context", "Fatal", "Retry", "Rota", "Task", "context"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import rota.sdk

    return getattr(rota.sdk, name)
