"""SQL kept as files: one statement per `.sql` file beside the Python that runs it.

The first line of a file is a comment that says what the statement is for. A module names its statements once, as
constants (`ACQUIRE = query(__package__, "acquire")`), so that a missing or unexplained file fails at import and not
in the middle of the night. A contract test prepares every file on the migrated schema.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import msgspec


class Query(msgspec.Struct, frozen=True):
    """One statement: `text` is what the server is sent, headed by `name`, so pg_stat_activity says who asked."""

    name: str
    purpose: str
    text: str


@cache
def query(package: str, name: str) -> Query:
    """Read `<package dir>/<name>.sql`."""
    return parse_query(f"{package}.{name}", files(package).joinpath(f"{name}.sql").read_text("utf-8"))


def parse_query(name: str, source: str) -> Query:
    """Take a file's purpose and statement apart; line numbers in the server's messages stay those of the file."""
    first, _, statement = source.partition("\n")
    purpose = first.removeprefix("--").strip()
    assert first.startswith("--"), f"the first line of {name} must be a comment that says what it is for"
    assert purpose, f"the first line of {name} must say what it is for"
    assert statement.strip(), f"{name} holds no statement"
    return Query(name=name, purpose=purpose, text=f"-- {name}: {purpose}\n{statement.rstrip().rstrip(';')}")
