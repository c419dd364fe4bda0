"""`rota config show`: every setting, its value and its origin. Secrets are masked in every output format."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

from rota.cli.core import output
from rota.cli.core.output_format import OutputFormat
from rota.model.settings import LoadedSettings, rows

if TYPE_CHECKING:
    from rich.table import Table


def show(loaded: LoadedSettings, *, form: OutputFormat = OutputFormat.TEXT, out: TextIO | None = None) -> None:
    """Write the settings to `out` (default: standard output), as a table or as one JSON or YAML array."""
    out = out or sys.stdout
    if form.is_data:
        out.write(output.format_data(_data(loaded), form))
        return
    with output.IgnoreBrokenPipe():
        output.console(out).print(settings_table(loaded), soft_wrap=False)


def _data(loaded: LoadedSettings) -> list[dict[str, object]]:
    """Durations are numbers in `unit`."""
    return [
        {
            "path": row.path,
            "value": row.value,
            "unit": row.unit or None,
            "source": row.origin.source,
            "where": row.origin.where or None,
        }
        for row in rows(loaded)
    ]


def settings_table(loaded: LoadedSettings) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("setting", "value", "from", box=None, pad_edge=False)
    table.columns[0].no_wrap = True
    for row in rows(loaded):
        is_default = row.origin.source == "default"
        # Text, not str: rich would parse a value such as [a-z] as markup.
        table.add_row(*(Text(cell, "dim" if is_default else "") for cell in (row.path, row.text, str(row.origin))))
    return table
