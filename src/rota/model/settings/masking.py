"""URLs for people: the credentials taken out. When in doubt more is masked, not less."""

from __future__ import annotations

import re
from typing import Final

MASK: Final = "***"

# A password may hold : / ? # or @ unescaped by mistake, so credentials reach to the last @ before the next URL.
_CREDENTIALS = re.compile(r"(?<=://)(?:(?!://).)*@", re.DOTALL)
_QUERY_SECRET = re.compile(r"([?&;][^=&;]*(?:pass|secret|token|key|auth)[^=&;]*=)[^&;]*", re.IGNORECASE)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]{0,20}://", re.IGNORECASE)


def masked_url(url: str) -> str:
    """`redis://rota:***@host:6379/0`; for a comma-separated list too."""
    return _QUERY_SECRET.sub(rf"\1{MASK}", _CREDENTIALS.sub(_without_password, url))


def only_scheme(text: str) -> str:
    """For a URL that is not understood: nobody can say where in it the password is."""
    found = _SCHEME.match(text)
    return f"{found[0]}{MASK}" if found else MASK


def _without_password(found: re.Match[str]) -> str:
    user, colon, _password = found[0].partition(":")
    # Without a colon it may be a user or, as in nats://token@host, all there is to know.
    return f"{user}:{MASK}@" if colon else f"{MASK}@"
