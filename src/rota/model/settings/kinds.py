"""Kinds of settings: how the text of a value is parsed, what is allowed, how it is displayed.

Text is parsed the same way from the file and from the environment, so `port: 5432` and `ROTA_..._PORT=5432` cannot
differ. `read` raises ValueError for a value that is not allowed; `allowed` completes the sentence "it must be ...". The
result of `show` never contains a secret.
"""

from __future__ import annotations

import re
from typing import ClassVar

import msgspec

from rota.model.errors import InvalidInput
from rota.model.settings.masking import MASK, masked_url, only_scheme
from rota.model.units import format_duration, parse_duration

SettingValue = bool | int | float | str | None

_INTEGER = re.compile(r"[+-]?(?:0|[1-9][0-9]{0,18})", re.ASCII)
_FLOAT = re.compile(r"[+-]?(?:0|[1-9][0-9]{0,17})(?:\.[0-9]{1,17})?", re.ASCII)
# Credentials end at the first @, so that a password with an unescaped @ / ? or # is refused, not misparsed.
_URL = re.compile(
    r"(?P<scheme>[a-z]+)://(?:[^\s@/?#]*@)?(?P<hosts>[^\s@/?#]*)(?P<path>/[^\s@?#]*)?(?:\?(?P<query>[^\s@#]*))?"
)
_PORT = r"(?:6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5]?[0-9]{1,4})"
_HOST = re.compile(rf"(?:\[[0-9a-fA-F:.]+\]|[\w.%-]+)(?::{_PORT})?")
_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}

INTEGER_MAX = 2**31 - 1
YEAR_S = 366 * 86400.0
YEAR_MS = 366 * 86_400_000


class SettingKind(msgspec.Struct, frozen=True):
    """Annotates a field of the tree. `env` is an additional environment variable besides the ROTA_ one."""

    meaning: str
    env: str = ""
    unit: ClassVar[str] = ""

    @property
    def allowed(self) -> str:
        raise AssertionError(f"{type(self).__name__} does not say what it allows")

    @property
    def brief(self) -> str:
        """`allowed` for a table on a page that explains how values are written."""
        return self.allowed

    def read(self, text: str) -> SettingValue:
        raise AssertionError(f"{type(self).__name__} does not say how {text!r} is read")

    def show(self, value: SettingValue) -> str:
        return "" if value is None else str(value)

    def show_invalid(self, text: str) -> str:
        """A refused value for the error message; masked, because a URL may be set anywhere by mistake."""
        text = masked_url(text)
        return text if len(text) <= 60 else f"{text[:57]}..."


class Boolean(SettingKind, frozen=True):
    @property
    def allowed(self) -> str:
        return "true or false"

    def read(self, text: str) -> bool:
        try:
            return _BOOLEANS[text.lower()]
        except KeyError:
            raise ValueError(text) from None

    def show(self, value: SettingValue) -> str:
        return "true" if value else "false"


class Integer(SettingKind, frozen=True, kw_only=True):
    least: int = 0
    most: int = INTEGER_MAX

    @property
    def allowed(self) -> str:
        unit = f" of {self.unit}" if self.unit else ""
        return f"a whole number{unit} from {self.least} to {self.most}"

    def read(self, text: str) -> int:
        if not _INTEGER.fullmatch(text) or not self.least <= int(text) <= self.most:
            raise ValueError(text)
        return int(text)


class Milliseconds(Integer, frozen=True, kw_only=True):
    """For names that end in -ms or -millis."""

    unit: ClassVar[str] = "milliseconds"
    most: int = YEAR_MS


class Seconds(Integer, frozen=True, kw_only=True):
    """For names that end in -seconds."""

    unit: ClassVar[str] = "seconds"
    most: int = int(YEAR_S)


class Float(SettingKind, frozen=True, kw_only=True):
    least: float = 0.0
    most: float = 1.0

    @property
    def allowed(self) -> str:
        return f"a number from {self.least:g} to {self.most:g}"

    def read(self, text: str) -> float:
        if not _FLOAT.fullmatch(text) or not self.least <= float(text) <= self.most:
            raise ValueError(text)
        return float(text)


class Duration(SettingKind, frozen=True, kw_only=True):
    """Stored in seconds, written with a unit. `bare` is the unit of a plain number, where one is accepted."""

    least: float = 0.001
    most: float = YEAR_S
    bare: str = ""
    unit: ClassVar[str] = "seconds"

    @property
    def allowed(self) -> str:
        return f"a duration with a unit, such as 500ms, 2s, 10min or 72h{self._or_plain}, {self._range}"

    @property
    def brief(self) -> str:
        return f"a duration{self._or_plain}, {self._range}"

    @property
    def _or_plain(self) -> str:
        return f", or a plain number of {self.bare}" if self.bare else ""

    @property
    def _range(self) -> str:
        return f"from {format_duration(self.least)} to {format_duration(self.most)}"

    def read(self, text: str) -> float:
        try:
            seconds = parse_duration(text + self.bare if _FLOAT.fullmatch(text) else text)
        except InvalidInput as error:
            raise ValueError(text) from error
        if not self.least <= seconds <= self.most:
            raise ValueError(text)
        return seconds

    def show(self, value: SettingValue) -> str:
        return format_duration(float(value or 0))


class Choice(SettingKind, frozen=True, kw_only=True):
    options: tuple[str, ...]

    @property
    def allowed(self) -> str:
        return " or ".join(self.options)

    def read(self, text: str) -> str:
        if text.lower() not in self.options:
            raise ValueError(text)
        return text.lower()


class String(SettingKind, frozen=True, kw_only=True):
    """Text that matches `pattern` as a whole; `described` is the pattern in words."""

    pattern: str = r"[^\x00-\x1f\x7f]*"
    described: str = "one line of text"

    @property
    def allowed(self) -> str:
        return self.described

    def read(self, text: str) -> str:
        if not re.fullmatch(self.pattern, text):
            raise ValueError(text)
        return text


class Secret(String, frozen=True):
    """Text that is never displayed."""

    def show(self, value: SettingValue) -> str:
        return MASK if value else ""

    def show_invalid(self, text: str) -> str:  # noqa: ARG002 - never displayed
        return MASK


class RegularExpression(SettingKind, frozen=True):
    """A regular expression that must match whole names."""

    @property
    def allowed(self) -> str:
        return "a regular expression that compiles"

    def read(self, text: str) -> str:
        try:
            re.compile(text)
        except (re.error, RecursionError, OverflowError):
            raise ValueError(text) from None
        return text


class Url(SettingKind, frozen=True, kw_only=True):
    """A URL that may contain a password. `several` allows a comma-separated list."""

    schemes: tuple[str, ...]
    several: bool = False

    @property
    def allowed(self) -> str:
        return f"{self.brief} that names a server, with special characters in the password percent-encoded"

    @property
    def brief(self) -> str:
        starts = " or ".join(f"{scheme}://" for scheme in self.schemes)
        return f"{'URLs' if self.several else 'a URL'} starting with {starts}"

    def read(self, text: str) -> str:
        for url in text.split(",") if self.several else (text,):
            if not self._fits(url):
                raise ValueError("not shown")
        return text

    def _fits(self, url: str) -> bool:
        found = _URL.fullmatch(url)
        if not found or found["scheme"] not in self.schemes:
            return False
        if found["scheme"] == "unix":
            return len(found["path"] or "") > 1
        # PostgreSQL accepts several hosts, or none if the query names one.
        hosts = [] if not found["hosts"] and "host=" in (found["query"] or "") else found["hosts"].split(",")
        return all(_HOST.fullmatch(host) for host in hosts)

    def show(self, value: SettingValue) -> str:
        return masked_url(value) if isinstance(value, str) else ""

    def show_invalid(self, text: str) -> str:
        return only_scheme(text)
