"""The extras of the distribution: `pip install rota` brings the SDK and the client, everything else needs an extra.

What a package needs is declared in pyproject.toml. This module turns the failed import of a missing one into one
sentence that says what to install. The extras include each other: local > server > worker > cli.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from rota.model.errors import ExtraMissing

Extra = Literal["cli", "worker", "server", "local"]


@contextmanager
def needs_extra(extra: Extra, what: str) -> Iterator[None]:
    """Around imports: raises ExtraMissing if a package is not installed. `what` needs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise extra_missing(error, extra, what) from error


def extra_missing(error: ModuleNotFoundError, extra: Extra, what: str) -> ExtraMissing:
    """The sentence for a failed import. Raises `error` if a module of Rota itself is missing: that is a defect."""
    package = (error.name or "").partition(".")[0]
    if package in {"", "rota"}:
        raise error
    return ExtraMissing(
        f"{what} needs {package}, which is not installed: run `pip install 'rota[{extra}]'`.",
        package=package,
        extra=extra,
    )
