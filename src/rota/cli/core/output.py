"""Output of commands: tables for people, JSON or YAML for programs, one sentence and a code for errors.

Printed values come from other systems, so they are never parsed as markup and control characters never reach the
terminal. A closed pipe (`| head`) does not abort the command.
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
"""A first column up to this width is never truncated."""
ID_CHARS_MIN = 13
"""Minimum length of a shortened id: the timestamp part of a UUIDv7."""
# A pipe has no width: programs that read it must not find a path broken over two lines.
PIPE_WIDTH = 1000


def console(out: TextIO | None = None) -> Console:
    from rich.console import Console

    class PipeSafeConsole(Console):
        def on_broken_pipe(self) -> None:
            """Rich's default would exit the process in the middle of its work."""
            raise BrokenPipeError

    width = None if (out or sys.stdout).isatty() else PIPE_WIDTH
    return PipeSafeConsole(file=out, width=width, highlight=False, markup=False, emoji=False, soft_wrap=True)


def print_data(answer: object, form: OutputFormat) -> None:
    """Print `answer` as one document for programs."""
    _write_stdout(format_data(answer, form))


def print_line(text: str, style: str = "") -> bool:
    """Print a line and flush, coloured on a terminal. False when standard output is closed."""
    with IgnoreBrokenPipe():
        if style and sys.stdout.isatty():
            console().print(printable(text), style=style)
        else:
            sys.stdout.write(f"{printable(text)}\n")
            sys.stdout.flush()
        return True
    return False


def format_data(answer: object, form: OutputFormat) -> str:
    """YAML has the same content as JSON."""
    import msgspec

    text = msgspec.json.encode(answer, enc_hook=str)
    if form is not OutputFormat.YAML:
        return msgspec.json.format(text, indent=2).decode() + "\n"
    import yaml

    plain = msgspec.json.decode(text)
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=PIPE_WIDTH)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, short: bool = False) -> None:
    """Print a table; `short` cuts ids on a terminal to their shortest unambiguous prefix, which commands accept."""
    if short and sys.stdout.isatty():
        rows = _with_short_ids(rows)
    with IgnoreBrokenPipe():
        console().print(make_table(columns, rows), soft_wrap=False)


def _with_short_ids(rows: Sequence[Sequence[object]]) -> Sequence[Sequence[object]]:
    ids = {cell: str(cell) for row in rows for cell in row if isinstance(cell, UUID)}
    shown = dict(zip(ids, shorten_ids(list(ids.values())), strict=True))
    return [[shown[cell] if isinstance(cell, UUID) else cell for cell in row] for row in rows]


def shorten_ids(ids: Sequence[str]) -> list[str]:
    """The shortest prefixes, of one length, that keep the ids distinct."""
    for length in range(ID_CHARS_MIN, 36):
        cut = [text[:length] for text in ids]
        if len(set(cut)) == len(set(ids)) and not any(text.endswith("-") for text in cut):
            return cut
    return list(ids)


class StyledText(str):
    """A table cell with a colour, which is dropped in a pipe or with NO_COLOR."""

    __slots__ = ("style",)
    style: str

    def __new__(cls, text: str, style: str) -> Self:
        styled = super().__new__(cls, text)
        styled.style = style
        return styled


def make_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*(Text(printable(str(cell)), getattr(cell, "style", "")) for cell in row))
    if table.columns and rows:
        # The first column holds the id or name to copy: a narrow terminal truncates the other columns.
        cells = max(len(str(row[0])) for row in rows)
        table.columns[0].min_width = cells if cells <= UNCUT_WIDTH_MAX else None
        table.columns[0].overflow = "fold"
    return table


def print_text(text: str, style: str = "") -> None:
    with IgnoreBrokenPipe():
        console().print(printable(text), style=style)


def print_stderr(text: str) -> None:
    """Print a side note to standard error, so that it does not mix with the data in a pipe."""
    with suppress(OSError):
        sys.stderr.write(f"{printable(text)}\n")
        sys.stderr.flush()


def print_error(error: RotaError) -> int:
    """Print an error to standard error and return the exit status: bad input or failure."""
    sys.stderr.write(f"rota: {printable(error.sentence)} [{error.code}]\n")
    if isinstance(error, NotEnded):
        return ExitCode.NOT_ENDED
    return ExitCode.BAD_INPUT if isinstance(error, InvalidInput) else ExitCode.FAILED


def print_unexpected_error(error: Exception) -> int:
    """Print a bug as one sentence; debug logs hold the traceback."""
    import structlog

    asyncpg = sys.modules.get("asyncpg")  # without the extra that has it, no such error can occur
    if asyncpg is not None and isinstance(error, asyncpg.PostgresError):
        sentence = f"PostgreSQL refused: {error}: check the user's privileges and that this is Rota's database."
        return print_error(SetupFailed(sentence))
    if structlog.is_configured():  # without settings, structlog's default would print the traceback
        structlog.get_logger(__name__).debug("unexpected_error", exc_info=error)
    detail = f"{type(error).__name__}: {error}"
    return print_error(
        RotaError(f"Unexpected error ({detail}): please report it with the log at ROTA_LOG_LEVEL=debug.")
    )


def printable(text: str) -> str:
    """`text` without control characters, which could move the cursor or hide text; newlines and tabs stay."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def _write_stdout(text: str) -> None:
    with IgnoreBrokenPipe():
        sys.stdout.write(text)
        sys.stdout.flush()


class IgnoreBrokenPipe:
    """Context manager around printing: after a broken pipe, further output is discarded."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if not isinstance(error, OSError):
            return False
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115  stays open as long as the process
        return True
