"""Redacts secrets from log lines, errors and pages.

Two rules. A value under a secret's name (`password`, `api_key`, `Authorization` ...) is masked entirely. In every text
the credentials of URLs, the secret part of a Rota API key and the value after `password=`, `token:` or `Bearer` are
masked. In doubt, more is masked. Numbers stay, because fencing tokens are shown, except under other secret names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

MASK: Final = "***"
_DEPTH_MAX: Final = 8

_SECRETS: Final = (
    "passw(?:or)?d|passphrase|secret|credential|authorization|cookie|token|(?:api|private|access|signing)[_-]?key"
)
_SECRET_NAME = re.compile(_SECRETS, re.IGNORECASE)
# A password may contain anything but a space, so credentials extend to the last @ before the next URL.
_URL_CREDENTIALS = re.compile(r"://((?:(?!://)\S)*)@")
_ASSIGNMENT = re.compile(
    rf"""((?:{_SECRETS})[\w-]{{0,40}}["']?\s{{0,8}}[:=]\s{{0,8}})"""
    r"""((?:bearer|basic)\s{1,8}[^\s"',;&]+|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\s"',;&)}\]]+)""",
    re.IGNORECASE,
)
# A mistyped key is still a secret. The id stays, to identify its user.
_API_KEY = re.compile(r"(rota_[0-9a-z]{10}_)[0-9A-Za-z]{12,}")
_BEARER = re.compile(r"\b((?:bearer|basic)\s{1,8})[A-Za-z0-9+/=._~-]{8,}", re.IGNORECASE)


def redact(value: object, name: str = "", depth: int = 0) -> object:
    """`value` as plain data (text, numbers, lists, dicts) without secrets. Never raises."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return MASK if is_secret(name) and "token" not in name.lower() else value
    if is_secret(name):
        return MASK
    if isinstance(value, str):
        return redact_text(value)
    if depth < _DEPTH_MAX:
        if isinstance(value, Mapping):
            return {redact_text(str(key)): redact(item, str(key), depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [redact(item, "", depth + 1) for item in value]
    return redact_text(_to_text(value))


def is_secret(name: str) -> bool:
    """Whether a value named `name` must be masked: `db_password`, `apiKey`, `X-Token`."""
    return _SECRET_NAME.search(name) is not None


def redact_text(text: str) -> str:
    if "://" in text:
        text = _URL_CREDENTIALS.sub(_mask_credentials, text)
    if "rota_" in text:
        text = _API_KEY.sub(rf"\1{MASK}", text)
    text = _ASSIGNMENT.sub(rf"\1{MASK}", text)
    return _BEARER.sub(rf"\1{MASK}", text)


def _mask_credentials(match: re.Match[str]) -> str:
    user, colon, _password = match[1].partition(":")
    # Without a colon it may be a user, or a token as in nats://token@host.
    return f"://{user}:{MASK}@" if colon else f"://{MASK}@"


def _to_text(value: object) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode(errors="backslashreplace")
    try:
        return repr(value)
    except Exception as broken:  # noqa: BLE001 - a log call never fails its caller
        return f"<{type(value).__name__}: repr failed with {type(broken).__name__}>"
