"""How commands answer: a table for people, JSON for programs, one sentence and a code for errors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from rota.model.errors import InvalidInput, RotaError

BAD_INPUT, FAILED = 2, 1


def as_json(answer: object) -> None:
    """Print `answer` as one JSON document."""
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(answer, enc_hook=str), indent=2) + b"\n")
    sys.stdout.flush()


def as_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    Console().print(table)


def say(text: str, **style: Any) -> None:
    from rich.console import Console

    Console(highlight=False).print(text, **style)


def refusal(error: RotaError) -> int:
    """Tell what is wrong on standard error; the exit status says whether the input or the world is to blame."""
    sys.stderr.write(f"rota: {error.sentence} [{error.code}]\n")
    return BAD_INPUT if isinstance(error, InvalidInput) else FAILED
