"""Options that commands share, and loading of the settings."""

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
        "--output",
        "-o",
        metavar="FORM",
        help="Output format: text, wide, json or yaml; --json is short for -o json.",
        show_default=False,
    ),
]


def load_settings(context: typer.Context, *, quietly: bool = False) -> LoadedSettings:
    """Load the settings from `--config` or the default file, and configure logging as they say.

    `quietly` raises the log level `info` to `warning`: short-lived commands and `rota up` print their own messages, so
    `info` is for servers and workers.
    """
    from rota.infra import settings_file
    from rota.infra.telemetry import logs

    loaded = settings_file.load(context.obj)
    level = loaded.settings.log.level
    logs.configure(loaded.settings.log.format, "warning" if quietly and level == "info" else level)
    return loaded


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` with a late import: importing asyncio takes longer than printing a command's help."""
    import asyncio

    return asyncio.run(work)
