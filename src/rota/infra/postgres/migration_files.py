"""Schema files in the packages of Rota: numbered migrations and repeatable functions.

`<package>/migrations/NNNN_{pre|post}_slug.sql` changes tables, types and indexes. Numbers start at 1 and define the
order over the whole project; a gap or a duplicate, usually the result of a merge, is refused. A merged migration never
changes (`tests/unit/infra/schema.lock`).

*pre* runs before new code starts and must be compatible with old code (add a table, a nullable column, an index);
*post* runs when no old code runs any more (drop a column, add a constraint). A file that begins with
`-- no transaction` holds one statement that PostgreSQL refuses inside a transaction, such as CREATE INDEX CONCURRENTLY
IF NOT EXISTS.

`<package>/functions/*.sql` holds PL/pgSQL functions and triggers, each statement a CREATE OR REPLACE. A file is applied
again whenever its checksum changes, after the *pre* migrations. Replicas of two versions run side by side during an
upgrade, so a function keeps its signature and its meaning: a change of either needs a new function, and a *post*
migration drops the old one. `FUNCTIONS_REVISION` increases with every change, so that an older version of Rota never
replaces newer functions.
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
FUNCTIONS_REVISION = 26
"""Increment it with every change of a function file; `schema.lock` in the tests compares it with their checksums."""
_NAME = re.compile(r"(\d{4})_(pre|post)_([a-z0-9_]+)\.sql")


class Migration(msgspec.Struct, frozen=True):
    number: int
    phase: Phase
    name: str
    """File name without `.sql`, as recorded in the database."""
    text: str
    checksum: str
    """SHA-256 of the text with Unix newlines, so that it does not depend on the platform of the checkout."""

    @property
    def in_transaction(self) -> bool:
        return not self.text.startswith(NO_TRANSACTION)


class FunctionFile(msgspec.Struct, frozen=True):
    """A file of functions and triggers; its statements are idempotent."""

    name: str
    """Path below the package, such as `queue/functions/claims.sql`."""
    text: str
    checksum: str


def discover(root: Traversable | None = None) -> tuple[Migration, ...]:
    """All migrations below `root`, by number. Those of the package `rota` are read once per process."""
    return _packaged() if root is None else _read(root)


@functools.cache
def _packaged() -> tuple[Migration, ...]:
    return _read(files("rota"))


@functools.cache
def discover_functions() -> tuple[FunctionFile, ...]:
    """All function files of Rota, by name."""
    found = _files(files("rota"), "functions")
    return tuple(sorted((_read_functions(name, file.read_text("utf-8")) for name, file in found), key=lambda f: f.name))


def _read_functions(name: str, source: str) -> FunctionFile:
    text = unix_newlines(source)
    return FunctionFile(name, text, checksum_of(text))


def unix_newlines(source: str) -> str:
    return source.replace("\r\n", "\n").replace("\r", "\n")


def checksum_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read(root: Traversable) -> tuple[Migration, ...]:
    return sort_and_validate(
        read_migration(file.name, file.read_text("utf-8")) for _, file in _files(root, "migrations")
    )


def read_migration(file_name: str, source: str) -> Migration:
    match = _NAME.fullmatch(file_name)
    if match is None:
        raise MigrationRefused(
            f"The migration file name {file_name} is not valid: use NNNN_pre_slug.sql or NNNN_post_slug.sql.",
            file=file_name,
        )
    text = unix_newlines(source)
    phase: Phase = "pre" if match[2] == "pre" else "post"
    return Migration(int(match[1]), phase, file_name.removesuffix(".sql"), text, checksum_of(text))


def sort_and_validate(found: Iterable[Migration]) -> tuple[Migration, ...]:
    """Sort by number; refuses a gap or a duplicate."""
    ordered = tuple(sorted(found, key=lambda migration: (migration.number, migration.name)))
    for expected, migration in enumerate(ordered, start=1):
        if migration.number < expected:
            twin = ordered[expected - 2].name
            raise MigrationRefused(
                f"Two migrations have the number {migration.number:04}, {twin} and {migration.name}: renumber the one"
                " that was not applied to any database.",
                file=migration.name,
            )
        if migration.number > expected:
            raise MigrationRefused(
                f"The migration {expected:04} before {migration.name} is missing: restore the file, or renumber.",
                file=migration.name,
            )
    return ordered


def _files(directory: Traversable, folder: str, below: str = "") -> Iterator[tuple[str, Traversable]]:
    """SQL files in folders of this name, each with its path below the root."""
    for entry in directory.iterdir():
        if not entry.is_dir() or entry.name == "__pycache__":
            continue
        path = f"{below}{entry.name}/"
        if entry.name == folder:
            yield from ((path + file.name, file) for file in entry.iterdir() if file.name.endswith(".sql"))
        else:
            yield from _files(entry, folder, path)
