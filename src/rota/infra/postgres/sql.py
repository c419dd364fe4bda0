"""Named SQL statements: each package keeps its own in one `queries.sql`.

A statement begins with its name and, on the next line, its purpose:

    -- name: lease_acquire
    -- Acquire the lease if it is free or has expired.
    UPDATE rota.lease SET ...

A module names its statements once, as constants (`ACQUIRE = query(__package__, "lease_acquire")`), so a missing or
undocumented statement fails at import. A contract test prepares every statement on the migrated schema.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

import msgspec

QUERIES_FILE = "queries.sql"
_HEAD = re.compile(r"(?:--[^\n]*(?:\n|$))+")
_NAME = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)


class Query(msgspec.Struct, frozen=True):
    """One statement. `text` is sent to the server and starts with `name`, so pg_stat_activity shows its origin."""

    name: str
    purpose: str
    text: str


def query(package: str, name: str) -> Query:
    """The statement `name` of the package's `queries.sql`."""
    statements = queries(package)
    assert name in statements, f"{package}/{QUERIES_FILE} has no statement named {name}"
    return statements[name]


@cache
def queries(package: str) -> dict[str, Query]:
    """All statements of a package by name, in file order."""
    return parse_queries(package, files(package).joinpath(QUERIES_FILE).read_text("utf-8"))


def parse_queries(package: str, source: str) -> dict[str, Query]:
    head, *parts = _NAME.split(source)
    assert not head.strip(), f"{package}/{QUERIES_FILE} must begin with `-- name:`"
    names, statements = parts[::2], parts[1::2]
    assert len(set(names)) == len(names), f"{package}/{QUERIES_FILE} has a name twice"
    return {
        name: parse_query(f"{package}.{name}", statement) for name, statement in zip(names, statements, strict=True)
    }


def parse_query(name: str, source: str) -> Query:
    """Split a statement into its purpose (the comment at its head) and its text."""
    head = _HEAD.match(source)
    assert head, f"{name} must begin with a comment that says what it is for"
    purpose = " ".join(line.removeprefix("--").strip() for line in head[0].splitlines()).strip()
    assert purpose, f"the comment at the head of {name} must say what it is for"
    statement = source[head.end() :]
    assert statement.strip(), f"{name} has no statement"
    return Query(name=name, purpose=purpose, text=f"-- {name}: {purpose}\n{statement.rstrip().rstrip(';')}")
