"""The migrations of this Rota, as found in its packages.

A file is `<room>/migrations/NNNN_{pre|post}_slug.sql`. Numbers run from 1 without a gap over the whole project: they
are the order, and a gap or a double means that two branches were merged without looking.

*pre* runs before new code starts and must suit the old code as well (add a table, a nullable column, an index); *post*
runs when no old code is left (drop, tighten). A file that begins with `-- no transaction` holds a single statement
that PostgreSQL refuses inside a transaction, such as CREATE INDEX CONCURRENTLY IF NOT EXISTS.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Literal

import msgspec

from rota.model.errors import MigrationRefused

Phase = Literal["pre", "post"]
NO_TRANSACTION = "-- no transaction"
_NAME = re.compile(r"(\d{4})_(pre|post)_([a-z0-9_]+)\.sql")


class Migration(msgspec.Struct, frozen=True):
    number: int
    phase: Phase
    name: str
    """The file's name without `.sql`; it is what people and the record in the database call it."""
    text: str
    checksum: str
    """SHA-256 of the text with unix newlines, so that a checkout on another system changes nothing."""

    @property
    def in_transaction(self) -> bool:
        return not self.text.startswith(NO_TRANSACTION)


def discover(root: Traversable | None = None) -> tuple[Migration, ...]:
    """Every migration below `root`, by number. Those of the `rota` package are read once per process."""
    return _ours() if root is None else _read(root)


@functools.cache
def _ours() -> tuple[Migration, ...]:
    return _read(files("rota"))


def _read(root: Traversable) -> tuple[Migration, ...]:
    return in_order(read_migration(file.name, file.read_text("utf-8")) for file in _files(root))


def read_migration(file_name: str, source: str) -> Migration:
    match = _NAME.fullmatch(file_name)
    if match is None:
        raise MigrationRefused(
            f"The migration file {file_name} is misnamed: call it NNNN_pre_what.sql or NNNN_post_what.sql.",
            file=file_name,
        )
    text = source.replace("\r\n", "\n").replace("\r", "\n")
    phase: Phase = "pre" if match[2] == "pre" else "post"
    checksum = hashlib.sha256(text.encode()).hexdigest()
    return Migration(int(match[1]), phase, file_name.removesuffix(".sql"), text, checksum)


def in_order(found: Iterable[Migration]) -> tuple[Migration, ...]:
    """Sort by number; a gap or a double is refused."""
    ordered = tuple(sorted(found, key=lambda migration: (migration.number, migration.name)))
    for expected, migration in enumerate(ordered, start=1):
        if migration.number < expected:
            twin = ordered[expected - 2].name
            raise MigrationRefused(
                f"Two migrations have the number {migration.number:04}, {twin} and {migration.name}: renumber the one"
                " that no database has applied.",
                file=migration.name,
            )
        if migration.number > expected:
            raise MigrationRefused(
                f"There is no migration {expected:04} before {migration.name}: restore the missing file, or renumber.",
                file=migration.name,
            )
    return ordered


def _files(directory: Traversable) -> Iterator[Traversable]:
    for entry in directory.iterdir():
        if entry.is_dir():
            if entry.name == "migrations":
                yield from (file for file in entry.iterdir() if file.name.endswith(".sql"))
            elif entry.name != "__pycache__":
                yield from _files(entry)
