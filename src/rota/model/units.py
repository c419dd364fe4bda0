"""Cores, memory and time: text and numbers in, exact integers or seconds out.

Invariants, kept by the functions here and shown by property tests:

* Cores are held as whole hundredths (`Centicores`), the unit of every PostgreSQL column. People and Redis see
  cores as decimal text. The way through text is exact in both directions; a binary float never takes part in
  the arithmetic, and a value finer than a hundredth is refused, not rounded.
* `UNLIMITED` is -1 on both sides and comes from nothing but -1. Only limits may be unlimited: what is booked
  or asked for has its own functions, which refuse every negative number.
* Memory is whole mebibytes. Time is seconds as a float; its text always carries a unit.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final, NewType

from rota.model.errors import InvalidInput

Centicores = NewType("Centicores", int)
Mebibytes = NewType("Mebibytes", int)

UNLIMITED: Final = Centicores(-1)
# What a PostgreSQL integer column holds: some 21 million cores.
CENTICORES_MAX: Final = Centicores(2**31 - 1)
MEBIBYTES_MAX: Final = Mebibytes(2**31 - 1)

# ASCII digits only, and not more than anybody needs: Decimal alone takes "1e9", "NaN", "1_0" and other scripts.
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
    """An amount of cores, such as 0.5 or "1.25", in hundredths."""
    exact = _exact(cores)
    if exact is None or exact < 0:
        raise InvalidInput(f"{_quote(cores)} is no amount of cores; write a number from 0 such as 4 or 0.5.")
    return _centicores(exact, cores)


def parse_cores_limit(cores: str | float | Decimal) -> Centicores:
    """A limit in cores; -1 means that there is none."""
    exact = _exact(cores)
    if exact == -1:
        return UNLIMITED
    if exact is None or exact < 0:
        raise InvalidInput(f"{_quote(cores)} is no limit in cores; write a number from 0, or -1 for no limit.")
    return _centicores(exact, cores)


def format_cores(amount: Centicores) -> str:
    """The shortest decimal text in cores: 50 is "0.5", 100 is "1"."""
    assert amount >= 0, "an amount of cores is never negative; limits have format_cores_limit"
    whole, hundredths = divmod(amount, 100)
    return f"{whole}.{hundredths:02d}".rstrip("0").rstrip(".")


def format_cores_limit(limit: Centicores) -> str:
    return "-1" if limit == UNLIMITED else format_cores(limit)


def parse_memory(text: str) -> Mebibytes:
    """Memory such as "512MiB" or "1.5GiB", in whole mebibytes."""
    found = _QUANTITY.fullmatch(text.strip())
    if found and found[2] in _MEBIBYTES_PER:
        mebibytes = Decimal(found[1]) * _MEBIBYTES_PER[found[2]]
        if mebibytes == int(mebibytes) <= MEBIBYTES_MAX:
            return Mebibytes(int(mebibytes))
    raise InvalidInput(f"{_quote(text)} is no amount of memory; write whole mebibytes such as 512MiB, 4GiB or 1.5TiB.")


def format_memory(amount: Mebibytes) -> str:
    """In the largest unit that needs no fraction: 1536 is "1536MiB", 4096 is "4GiB"."""
    assert amount >= 0, "an amount of memory is never negative"
    unit = next(unit for unit in ("TiB", "GiB", "MiB") if amount % _MEBIBYTES_PER[unit] == 0 or unit == "MiB")
    return f"{amount // _MEBIBYTES_PER[unit]}{unit}" if amount else "0MiB"


def parse_duration(text: str) -> float:
    """A time with its unit, such as "500ms", "2s", "10min" or "72h", in seconds."""
    found = _QUANTITY.fullmatch(text.strip())
    if found and found[2] in _SECONDS_PER:
        return float(Decimal(found[1]) * _SECONDS_PER[found[2]])
    raise InvalidInput(f"{_quote(text)} is no time; write a number with its unit such as 500ms, 2s, 10min, 72h or 30d.")


def format_duration(seconds: float) -> str:
    """In the largest unit that needs no fraction: 0.5 is "500ms", 90 is "90s", 7200 is "2h"."""
    assert seconds >= 0, "a time span is never negative"
    exact = Decimal(repr(seconds))
    for unit in ("d", "h", "m", "s"):
        if exact and exact % _SECONDS_PER[unit] == 0:
            return f"{exact / _SECONDS_PER[unit]:f}".partition(".")[0] + unit
    milliseconds = f"{exact * 1000:f}"
    return (milliseconds.rstrip("0").rstrip(".") if "." in milliseconds else milliseconds) + "ms"


def _exact(number: str | float | Decimal) -> Decimal | None:
    """The number as written, or None when it is none. A float counts as its shortest text: 0.29 is 0.29."""
    if isinstance(number, bool):
        return None
    if isinstance(number, str):
        digits = number.strip()
        negative = digits.startswith("-")
        return Decimal(digits) if _NUMBER.fullmatch(digits[negative:]) else None
    exact = Decimal(repr(number)) if isinstance(number, float) else Decimal(number)
    return exact if exact.is_finite() else None


def _centicores(exact: Decimal, given: str | float | Decimal) -> Centicores:
    if exact > Decimal(CENTICORES_MAX).scaleb(-2):
        raise InvalidInput(f"{_quote(given)} cores are too many; the most is {format_cores(CENTICORES_MAX)}.")
    hundredths = int(exact * 100)
    # Decimal rounds products to 28 digits but compares exactly.
    if Decimal(hundredths).scaleb(-2) != exact:
        raise InvalidInput(f"{_quote(given)} cores are too fine; write at most two decimals such as 0.25.")
    return Centicores(hundredths)


def _quote(given: str | float | Decimal) -> str:
    text = repr(given) if isinstance(given, str) else f"{Decimal(given):.6g}" if _is_huge(given) else str(given)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _is_huge(number: float | Decimal) -> bool:
    """Python refuses to write integers of thousands of digits out."""
    return isinstance(number, int) and number.bit_length() > 128


def humanize_duration(seconds: float) -> str:
    """A time as people say it, to two digits or so."""
    for unit_s, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
