"""How commands answer: a table for people, JSON or YAML for programs, one sentence and a code for errors.

What is printed is never taken for markup, and control characters in it never reach the terminal: names, paths and
messages of servers come from elsewhere. A reader that went away (`| head`) ends no work.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Self, TextIO
from uuid import UUID

from rota.cli.core.exit_codes import ExitCode
from rota.cli.core.output_format import OutputFormat
from rota.model.errors import InvalidInput, NotEnded, RotaError, SetupFailed

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

UNCUT_WIDTH_MAX = 20
"""First columns up to this wide are never cut."""
ID_CHARS_MIN = 13
"""Characters of an id that are shown at least: those that tell when it was made."""
# A pipe has no width: nothing that reads it should find a path broken over two lines.
PIPE_WIDTH = 1000


def console(out: TextIO | None = None) -> Console:
    from rich.console import Console

    class Patient(Console):
        def on_broken_pipe(self) -> None:
            """By default the process would end here, with whatever it was doing."""
            raise BrokenPipeError

    width = None if (out or sys.stdout).isatty() else PIPE_WIDTH
    return Patient(file=out, width=width, highlight=False, markup=False, emoji=False, soft_wrap=True)


def print_data(answer: object, form: OutputFormat) -> None:
    """Print `answer` as one document for programs."""
    _write_stdout(format_data(answer, form))


def print_line(text: str, style: str = "") -> bool:
    """Print a line at once, in colour to a terminal; False when nobody reads any more."""
    with IgnoreBrokenPipe():
        if style and sys.stdout.isatty():
            console().print(printable(text), style=style)
        else:
            sys.stdout.write(f"{printable(text)}\n")
            sys.stdout.flush()
        return True
    return False


def format_data(answer: object, form: OutputFormat) -> str:
    """YAML says the same as JSON."""
    import msgspec

    text = msgspec.json.encode(answer, enc_hook=str)
    if form is not OutputFormat.YAML:
        return msgspec.json.format(text, indent=2).decode() + "\n"
    import yaml

    plain = msgspec.json.decode(text)
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=PIPE_WIDTH)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, short: bool = False) -> None:
    """`short`: a terminal sees no more of each id than tells it from the others, with which it can be named, too."""
    if short and sys.stdout.isatty():
        rows = _with_short_ids(rows)
    with IgnoreBrokenPipe():
        console().print(make_table(columns, rows), soft_wrap=False)


def _with_short_ids(rows: Sequence[Sequence[object]]) -> Sequence[Sequence[object]]:
    ids = {cell: str(cell) for row in rows for cell in row if isinstance(cell, UUID)}
    shown = dict(zip(ids, shorten_ids(list(ids.values())), strict=True))
    return [[shown[cell] if isinstance(cell, UUID) else cell for cell in row] for row in rows]


def shorten_ids(ids: Sequence[str]) -> list[str]:
    """As much of each as tells it from all the others."""
    for length in range(ID_CHARS_MIN, 36):
        cut = [text[:length] for text in ids]
        if len(set(cut)) == len(set(ids)) and not any(text.endswith("-") for text in cut):
            return cut
    return list(ids)


class StyledText(str):
    """A cell with a colour, which a pipe or NO_COLOR does without."""

    __slots__ = ("style",)
    style: str

    def __new__(cls, text: str, style: str) -> Self:
        made = super().__new__(cls, text)
        made.style = style
        return made


def make_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    drawn = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        drawn.add_row(*(Text(printable(str(cell)), getattr(cell, "style", "")) for cell in row))
    if drawn.columns and rows:
        # What names a thing is to be copied: a narrow terminal cuts the others.
        cells = max(len(str(row[0])) for row in rows)
        drawn.columns[0].min_width = cells if cells <= UNCUT_WIDTH_MAX else None
        drawn.columns[0].overflow = "fold"
    return drawn


def print_text(text: str, style: str = "") -> None:
    with IgnoreBrokenPipe():
        console().print(printable(text), style=style)


def print_stderr(text: str) -> None:
    """A line beside the answer, on standard error: whoever reads the answer in a pipe does not see it."""
    with suppress(OSError):
        sys.stderr.write(f"{printable(text)}\n")
        sys.stderr.flush()


def print_error(error: RotaError) -> int:
    """Tell what is wrong on standard error; the exit status says whether the input or the world is to blame."""
    sys.stderr.write(f"rota: {printable(error.sentence)} [{error.code}]\n")
    if isinstance(error, NotEnded):
        return ExitCode.NOT_ENDED
    return ExitCode.BAD_INPUT if isinstance(error, InvalidInput) else ExitCode.FAILED


def print_unexpected_error(error: Exception) -> int:
    """Something that nobody foresaw: one sentence all the same, and the trace for those who ask for debug logs."""
    import asyncpg
    import structlog

    if isinstance(error, asyncpg.PostgresError):
        sentence = f"PostgreSQL refused: {error}; check the rights of its user and that the database is Rota's."
        return print_error(SetupFailed(sentence))
    if structlog.is_configured():  # else the settings could not even be read, and it would print whatever it holds
        structlog.get_logger(__name__).debug("defect", exc_info=error)
    trouble = f"{type(error).__name__}: {error}"
    return print_error(
        RotaError(f"This should not happen ({trouble}); please report it with ROTA_LOG_LEVEL=debug set.")
    )


def printable(text: str) -> str:
    """`text` without control characters, which could move the cursor or hide a part of it; lines stay lines."""
    return "".join(mark if mark.isprintable() or mark in "\n\t" else "\N{REPLACEMENT CHARACTER}" for mark in text)


def _write_stdout(text: str) -> None:
    with IgnoreBrokenPipe():
        sys.stdout.write(text)
        sys.stdout.flush()


class IgnoreBrokenPipe:
    """Around printing: when nobody reads any more, the rest goes nowhere."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if not isinstance(error, OSError):
            return False
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115  stays open as long as the process
        return True
