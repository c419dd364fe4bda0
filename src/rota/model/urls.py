"""URLs that may contain a password: the address without credentials, and validation.

A password may contain an unescaped `/`, `?`, `#` or `@` by mistake. Parsers then mistake parts of it for a host, port
or path. So parser results are displayed only through `address`, and `validate_url` refuses such a URL before anything
connects to it. In doubt, more is masked.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import parse_qs, unquote

MASK: Final = "***"

# An @ after the hosts means that the password contains a raw / ? or #, or a parameter a raw @: ambiguous, so no match.
_URL = re.compile(
    r"(?P<scheme>[a-z]+)://(?:[^\s/?#]*@)?(?P<hosts>[^\s/?#@]*)(?P<path>/[^\s?#@]*)?(?:\?(?P<query>[^\s#@]*))?",
    re.IGNORECASE,
)
_HOST = r"(?:\[[\w:.%]+\]|[\w.-]+|/[\w./-]+)(?::[0-9]{1,5})?"
_ADDRESS = re.compile(rf"(?:{_HOST}(?:,{_HOST})*)?(?:/[^\s@]*)?")


def address(url: str) -> str:
    """Host, port and database or path, such as `127.0.0.1:5432/rota`; `***` if they cannot be determined safely."""
    found = _URL.fullmatch(url)
    if found is None:
        return MASK
    # PostgreSQL also accepts the host, or the directory of its socket, as a query parameter.
    hosts = unquote(found["hosts"]) or parse_qs(found["query"] or "").get("host", [""])[0]
    if not hosts and found["scheme"] != "unix":
        hosts = "localhost"
    shown = hosts + unquote(found["path"] or "")
    return shown if _ADDRESS.fullmatch(shown) and shown.isprintable() else MASK


def validate_url(url: str) -> str:
    """`url` if every parser finds the same parts in it; otherwise a ValueError that does not quote it."""
    if _URL.fullmatch(url) is None:
        raise ValueError("not a URL, or special characters of the password are not percent-encoded")
    return url
