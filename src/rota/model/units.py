"""Cores, memory and durations: parse text and numbers into exact integers or seconds, and format them.

Invariants, enforced by these functions and checked by property tests:

* Cores are stored as whole hundredths (`Centicores`), the unit of every PostgreSQL column. Users and Redis see decimal
  text. Conversion is exact in both directions: no binary float takes part, and a value finer than a hundredth is
  refused, not rounded.
* `UNLIMITED` is -1 in both forms and only -1 parses to it. Only limits may be unlimited; the functions for booked and
  requested amounts refuse every negative number.
* Memory is whole mebibytes. Durations are seconds as a float; their text always has a unit.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final, NewType

from rota.model.errors import InvalidInput

Centicores = NewType("Centicores", int)
Mebibytes = NewType("Mebibytes", int)

UNLIMITED: Final = Centicores(-1)
# The maximum of a PostgreSQL integer column: about 21 million cores.
CENTICORES_MAX: Final = Centicores(2**31 - 1)
MEBIBYTES_MAX: Final = Mebibytes(2**31 - 1)

# ASCII digits only, of limited length: Decimal also accepts "1e9", "NaN", "1_0" and digits of other scripts.
_NUMBER = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,15})?", re.ASCII)
_QUANTITY = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)\s?([A-Za-z]+)", re.ASCII)

_SECONDS_PER: Final = {
    "ms": Decimal("0.001"),
    "s": Decimal(1),
    "m": Decimal(60),
    "min": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
}
_MEBIBYTES_PER: Final = {"MiB": 1, "GiB": 1024, "TiB": 1024 * 1024}


def parse_cores(cores: str | float | Decimal) -> Centicores:
    """Parse an amount of cores, such as 0.5 or "1.25", into hundredths."""
    exact = _exact(cores)
    if exact is None or exact < 0:
        raise InvalidInput(f"{_quote(cores)} is not a valid amount of cores: use a number from 0, such as 4 or 0.5.")
    return _centicores(exact, cores)


def parse_cores_limit(cores: str | float | Decimal) -> Centicores:
    """Parse a limit in cores; -1 means unlimited."""
    exact = _exact(cores)
    if exact == -1:
        return UNLIMITED
    if exact is None or exact < 0:
        raise InvalidInput(f"{_quote(cores)} is not a valid limit in cores: use a number from 0, or -1 for no limit.")
    return _centicores(exact, cores)


def format_cores(amount: Centicores) -> str:
    """The shortest decimal text in cores: 50 is "0.5", 100 is "1"."""
    assert amount >= 0, "an amount of cores is never negative; limits have format_cores_limit"
    whole, hundredths = divmod(amount, 100)
    return f"{whole}.{hundredths:02d}".rstrip("0").rstrip(".")


def format_cores_limit(limit: Centicores) -> str:
    return "-1" if limit == UNLIMITED else format_cores(limit)


def parse_memory(text: str) -> Mebibytes:
    """Parse an amount such as "512MiB" or "1.5GiB" into whole mebibytes."""
    found = _QUANTITY.fullmatch(text.strip())
    if found and found[2] in _MEBIBYTES_PER:
        mebibytes = Decimal(found[1]) * _MEBIBYTES_PER[found[2]]
        if mebibytes == int(mebibytes) <= MEBIBYTES_MAX:
            return Mebibytes(int(mebibytes))
    raise InvalidInput(
        f"{_quote(text)} is not a valid amount of memory: use whole mebibytes, such as 512MiB, 4GiB or 1.5TiB."
    )


def format_memory(amount: Mebibytes) -> str:
    """Format in the largest unit that needs no fraction: 1536 is "1536MiB", 4096 is "4GiB"."""
    assert amount >= 0, "an amount of memory is never negative"
    unit = next(unit for unit in ("TiB", "GiB", "MiB") if amount % _MEBIBYTES_PER[unit] == 0 or unit == "MiB")
    return f"{amount // _MEBIBYTES_PER[unit]}{unit}" if amount else "0MiB"


def parse_duration(text: str) -> float:
    """Parse a duration such as "500ms", "2s", "10min" or "72h" into seconds."""
    found = _QUANTITY.fullmatch(text.strip())
    if found and found[2] in _SECONDS_PER:
        return float(Decimal(found[1]) * _SECONDS_PER[found[2]])
    raise InvalidInput(
        f"{_quote(text)} is not a valid duration: use a number with a unit, such as 500ms, 2s, 10min, 72h or 30d."
    )


def format_duration(seconds: float) -> str:
    """Format in the largest unit that needs no fraction: 0.5 is "500ms", 90 is "90s", 7200 is "2h"."""
    assert seconds >= 0, "a duration is never negative"
    exact = Decimal(repr(seconds))
    for unit in ("d", "h", "m", "s"):
        if exact and exact % _SECONDS_PER[unit] == 0:
            return f"{exact / _SECONDS_PER[unit]:f}".partition(".")[0] + unit
    milliseconds = f"{exact * 1000:f}"
    return (milliseconds.rstrip("0").rstrip(".") if "." in milliseconds else milliseconds) + "ms"


def _exact(number: str | float | Decimal) -> Decimal | None:
    """The number exactly as written, or None if it is not one. A float counts as its shortest repr: 0.29 is 0.29."""
    if isinstance(number, bool):
        return None
    if isinstance(number, str):
        digits = number.strip()
        negative = digits.startswith("-")
        return Decimal(digits) if _NUMBER.fullmatch(digits[negative:]) else None
    exact = Decimal(repr(number)) if isinstance(number, float) else Decimal(number)
    return exact if exact.is_finite() else None


def _centicores(exact: Decimal, original: str | float | Decimal) -> Centicores:
    if exact > Decimal(CENTICORES_MAX).scaleb(-2):
        raise InvalidInput(f"{_quote(original)} cores are too many: use at most {format_cores(CENTICORES_MAX)}.")
    hundredths = int(exact * 100)
    # Decimal rounds products to 28 digits but compares exactly.
    if Decimal(hundredths).scaleb(-2) != exact:
        raise InvalidInput(f"{_quote(original)} cores are too precise: use at most two decimals, such as 0.25.")
    return Centicores(hundredths)


def _quote(original: str | float | Decimal) -> str:
    text = (
        repr(original)
        if isinstance(original, str)
        else f"{Decimal(original):.6g}"
        if _is_huge(original)
        else str(original)
    )
    return text if len(text) <= 40 else f"{text[:37]}..."


def _is_huge(number: float | Decimal) -> bool:
    """Whether `number` has so many digits that Python refuses to convert it to text."""
    return isinstance(number, int) and number.bit_length() > 128


def humanize_duration(seconds: float) -> str:
    """Approximate duration for display, with about two significant digits."""
    for unit_s, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
