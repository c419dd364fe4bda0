"""What commands share: options, and how the settings are read."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from rota.cli.core.output_format import OutputFormat

if TYPE_CHECKING:
    from rota.infra.settings_file import LoadedSettings

T = TypeVar("T")
OutputOption = Annotated[
    OutputFormat,
    typer.Option(
        "--output", "-o", metavar="FORM", help="text, wide, json or yaml; --json is -o json.", show_default=False
    ),
]


def load_settings(context: typer.Context, *, quietly: bool = False) -> LoadedSettings:
    """The settings, from the file that `--config` names if it does; logs are written as they say from here on.

    A command that answers and leaves has no news of its own, and `rota up` tells a person in its own words: `quietly`
    keeps the level `info` for servers and workers.
    """
    from rota.infra import settings_file
    from rota.infra.telemetry import logs

    loaded = settings_file.load(context.obj)
    level = loaded.settings.log.level
    logs.configure(loaded.settings.log.format, "warning" if quietly and level == "info" else level)
    return loaded


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, which takes longer to import than the help of a command to print."""
    import asyncio

    return asyncio.run(work)
