"""Checks a Python call of a script against the script's header and encodes it as arguments of EVALSHA.

A call that does not match is a programming error: it raises `TypeError` before anything is sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final, NoReturn

import msgspec

from rota.infra.redis.script_contract import ScriptContract

CommandArgument = str | bytes | int | float

EXACT_INT_MAX: Final = 2**53
"""Larger integers lose digits in Lua, whose only number type is a double."""

_PACK = msgspec.msgpack.Encoder()


class ScriptArguments:
    """The parameters of one script, in the order of KEYS and ARGV."""

    def __init__(self, header: ScriptContract) -> None:
        self._script = header.script
        self._keys = sum(not key.many for key in header.keys)
        self._key_list = next((key.name for key in header.keys if key.many), None)
        self._parameters: tuple[tuple[str, bool, Callable[[object], CommandArgument]], ...] = (
            *((key.name, key.many, _key) for key in header.keys),
            *((arg.name, arg.many, _CONVERT[arg.type]) for arg in header.args),
        )

    def encode(self, arguments: Mapping[str, object]) -> list[CommandArgument]:
        """The arguments after the digest in EVALSHA: number of keys, keys, arguments."""
        encoded: list[CommandArgument] = [self._keys]
        if len(arguments) != len(self._parameters):
            self._raise_mismatch(arguments)
        for name, many, convert in self._parameters:
            try:
                if many:
                    self._extend(encoded, name, arguments[name], convert)
                else:
                    encoded.append(convert(arguments[name]))
            except KeyError:
                self._raise_mismatch(arguments)
            except _ArgumentMismatch as mismatch:
                raise TypeError(f"script {self._script}: {name} must be {mismatch}") from None
        return encoded

    def _extend(
        self, encoded: list[CommandArgument], name: str, values: object, convert: Callable[[object], CommandArgument]
    ) -> None:
        if not isinstance(values, (list, tuple)):
            raise _ArgumentMismatch("a list or tuple", values)
        encoded.extend([convert(value) for value in values])
        if name == self._key_list:
            encoded[0] = self._keys + len(values)

    def _raise_mismatch(self, arguments: Mapping[str, object]) -> NoReturn:
        names = [name for name, _, _ in self._parameters]
        missing = [name for name in names if name not in arguments]
        unknown = [name for name in arguments if name not in names]
        raise TypeError(f"script {self._script} takes {names}: missing {missing}, unknown {unknown}")


class _ArgumentMismatch(Exception):
    def __init__(self, expected: str, value: object) -> None:
        # Only the type: the value may be a secret.
        super().__init__(f"{expected}, not {type(value).__name__}")


def _key(value: object) -> CommandArgument:
    if isinstance(value, (str, bytes)):
        return value
    raise _ArgumentMismatch("a key (str or bytes)", value)


def _int(value: object) -> CommandArgument:
    if value.__class__ is not int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise _ArgumentMismatch("an int", value)
        value = int(value)  # redis-py would send the repr of an IntEnum
    if not -EXACT_INT_MAX <= value <= EXACT_INT_MAX:
        raise _ArgumentMismatch("an int within ±2^53", value)
    return value


def _float(value: object) -> CommandArgument:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    raise _ArgumentMismatch("a finite float", value)


def _bool(value: object) -> CommandArgument:
    if isinstance(value, bool):
        return b"1" if value else b"0"
    raise _ArgumentMismatch("a bool", value)


def _str(value: object) -> CommandArgument:
    if isinstance(value, str):
        return value
    raise _ArgumentMismatch("a str", value)


def _bytes(value: object) -> CommandArgument:
    if isinstance(value, bytes):
        return value
    raise _ArgumentMismatch("bytes", value)


def _packed(value: object) -> CommandArgument:
    return _PACK.encode(value)


_CONVERT: Final[dict[str, Callable[[object], CommandArgument]]] = {
    "int": _int,
    "float": _float,
    "bool": _bool,
    "str": _str,
    "bytes": _bytes,
    "packed": _packed,
}
