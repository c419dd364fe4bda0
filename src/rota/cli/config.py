"""`rota config show`: every setting, its value and where it came from. Secrets are masked in both forms."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

from rota.model.settings import LoadedSettings, rows

if TYPE_CHECKING:
    from rich.table import Table


def show(loaded: LoadedSettings, *, as_json: bool = False, out: TextIO | None = None) -> None:
    """Write the settings to `out` (standard output): a table for people, or one JSON array."""
    out = out or sys.stdout
    if as_json:
        out.write(as_json_text(loaded) + "\n")
        return
    from rota.cli import output

    with output.readers_may_leave():
        output.console(out).print(as_table(loaded), soft_wrap=False)


def as_json_text(loaded: LoadedSettings) -> str:
    """`[{"path", "value", "unit", "source", "where"}, ...]`; times are numbers in `unit`."""
    import msgspec

    found = [
        {
            "path": row.path,
            "value": row.value,
            "unit": row.unit or None,
            "source": row.origin.source,
            "where": row.origin.where or None,
        }
        for row in rows(loaded)
    ]
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode()


def as_table(loaded: LoadedSettings) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("setting", "value", "from", box=None, pad_edge=False)
    table.columns[0].no_wrap = True
    for row in rows(loaded):
        is_default = row.origin.source == "default"
        # Text, not str: a value such as [a-z] is no markup.
        table.add_row(*(Text(cell, "dim" if is_default else "") for cell in (row.path, row.text, str(row.origin))))
    return table
