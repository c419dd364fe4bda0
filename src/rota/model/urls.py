"""URLs that hold a password, for people: where a server is, and nothing else.

A password may hold `/`, `?`, `#` or `@` unescaped by mistake. Parsers then take a piece of it for a host, a port or a
path, so nobody shows what a parser found without asking here, and nobody connects to it: `checked` refuses such a URL.
When in doubt more is hidden, not less.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import parse_qs, unquote

MASK: Final = "***"

# An @ after the hosts means that the password holds a raw / ? or #, or a parameter a raw @: nobody can say which.
_URL = re.compile(
    r"(?P<scheme>[a-z]+)://(?:[^\s/?#]*@)?(?P<hosts>[^\s/?#@]*)(?P<path>/[^\s?#@]*)?(?:\?(?P<query>[^\s#@]*))?",
    re.IGNORECASE,
)
_HOST = r"(?:\[[\w:.%]+\]|[\w.-]+|/[\w./-]+)(?::[0-9]{1,5})?"
_ADDRESS = re.compile(rf"(?:{_HOST}(?:,{_HOST})*)?(?:/[^\s@]*)?")


def address(url: str) -> str:
    """Host, port and database or path, such as `127.0.0.1:5432/rota`; `***` when they cannot be told for sure."""
    found = _URL.fullmatch(url)
    if found is None:
        return MASK
    # PostgreSQL takes the host, or the directory of its socket, as a parameter, too.
    hosts = unquote(found["hosts"]) or parse_qs(found["query"] or "").get("host", [""])[0]
    if not hosts and found["scheme"] != "unix":
        hosts = "localhost"
    shown = hosts + unquote(found["path"] or "")
    return shown if _ADDRESS.fullmatch(shown) and shown.isprintable() else MASK


def validate_url(url: str) -> str:
    """`url`, when every parser finds the same parts in it; else a ValueError, which does not quote it."""
    if _URL.fullmatch(url) is None:
        raise ValueError("not a URL, or special characters of the password are not percent-encoded")
    return url
