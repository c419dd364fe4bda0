"""URLs for display, with credentials masked. In doubt, more is masked."""

from __future__ import annotations

import re

from rota.model.urls import MASK

__all__ = ["MASK", "masked_url", "only_scheme"]

# A password may contain an unescaped : / ? # or @, so credentials extend to the last @ before the next URL of a list.
_CREDENTIALS = re.compile(r"(?<=://)(?:(?!,\s*(?:nats|tls)://).)*@", re.DOTALL)
_QUERY_SECRET = re.compile(r"([?&;][^=&;]*(?:pass|secret|token|key|auth)[^=&;]*=)([^&;]*)", re.IGNORECASE)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]{0,20}://", re.IGNORECASE)


def masked_url(url: str) -> str:
    """`redis://rota:***@host:6379/0`; also for a comma-separated list."""
    if any("@" in secret[2] for secret in _QUERY_SECRET.finditer(url)):
        return only_scheme(url)
    return _QUERY_SECRET.sub(rf"\1{MASK}", _CREDENTIALS.sub(_without_password, url))


def only_scheme(text: str) -> str:
    """For a URL that cannot be parsed: the position of its password is unknown."""
    found = _SCHEME.match(text)
    return f"{found[0]}{MASK}" if found else MASK


def _without_password(found: re.Match[str]) -> str:
    user, colon, _password = found[0].partition(":")
    # Without a colon it may be a user or, as in nats://token@host, the whole secret.
    return f"{user}:{MASK}@" if colon else f"{MASK}@"
