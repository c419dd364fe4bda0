"""URLs for people: the credentials taken out. When in doubt more is masked, not less."""

from __future__ import annotations

import re

from rota.model.urls import MASK

__all__ = ["MASK", "masked_url", "only_scheme"]

# A password may hold : / ? # or @ unescaped by mistake, so credentials reach to the last @ before the next of a list.
_CREDENTIALS = re.compile(r"(?<=://)(?:(?!,\s*(?:nats|tls)://).)*@", re.DOTALL)
_QUERY_SECRET = re.compile(r"([?&;][^=&;]*(?:pass|secret|token|key|auth)[^=&;]*=)([^&;]*)", re.IGNORECASE)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]{0,20}://", re.IGNORECASE)


def masked_url(url: str) -> str:
    """`redis://rota:***@host:6379/0`; for a comma-separated list too."""
    if any("@" in secret[2] for secret in _QUERY_SECRET.finditer(url)):
        return only_scheme(url)
    return _QUERY_SECRET.sub(rf"\1{MASK}", _CREDENTIALS.sub(_without_password, url))


def only_scheme(text: str) -> str:
    """For a URL that is not understood: nobody can say where in it the password is."""
    found = _SCHEME.match(text)
    return f"{found[0]}{MASK}" if found else MASK


def _without_password(found: re.Match[str]) -> str:
    user, colon, _password = found[0].partition(":")
    # Without a colon it may be a user or, as in nats://token@host, all there is to know.
    return f"{user}:{MASK}@" if colon else f"{MASK}@"
