"""Protobuf's wire format for flat messages, so that gRPC needs neither its runtime nor generated code (ADR 0012).

    class GetShowRequest(Message, frozen=True):
        show: str = ""

The fields of a `Message` are those of its `.proto` file in the same order, numbered from 1: `str` is string, `bool`
bool, `int` uint64, and `| None` optional; a test holds the two together. A decoder's duties are kept: fields come in
any order, the last of several wins, what is unknown or of another wire type is skipped, and bytes that are no message
are refused, whatever they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Final, TypeVar, get_args

import msgspec

from rota.model.errors import InvalidInput

VARINT: Final = 0
FIXED64: Final = 1
BYTES: Final = 2
FIXED32: Final = 5
VARINT_BYTES_MAX: Final = 10
UINT64_MASK: Final = 2**64 - 1


class Message(msgspec.Struct, frozen=True):
    """A flat message: strings, bools and unsigned numbers, all with defaults."""


MessageT = TypeVar("MessageT", bound=Message)


class Field(msgspec.Struct, frozen=True):
    name: str
    kind: type
    optional: bool


@cache
def fields(message: type[Message]) -> Mapping[int, Field]:
    """The fields by their numbers."""
    found = {}
    for number, info in enumerate(msgspec.structs.fields(message), 1):
        kinds = [kind for kind in get_args(info.type) or (info.type,) if kind is not type(None)]
        assert kinds[0] in (str, bool, int), f"{info.name} is of a kind that has no place in a flat message"
        found[number] = Field(info.name, kinds[0], type(None) in get_args(info.type))
    return found


def encode(message: Message) -> bytes:
    """What is empty, 0 or false is left out, as proto3 wants it, unless it is optional and set."""
    parts = []
    for number, field in fields(type(message)).items():
        value = getattr(message, field.name)
        if value or (field.optional and value is not None):
            parts.append(_encoded(number, value))
    return b"".join(parts)


def _encoded(number: int, value: str | int) -> bytes:
    if isinstance(value, str):
        text = value.encode()
        return _varint(number << 3 | BYTES) + _varint(len(text)) + text
    return _varint(number << 3 | VARINT) + _varint(value)


def _varint(value: int) -> bytes:
    assert 0 <= value <= UINT64_MASK, "numbers are unsigned and of 64 bits"
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])


def decode(data: bytes, message: type[MessageT]) -> MessageT:
    """Raises InvalidInput for what is no message."""
    known, found = fields(message), {}
    for number, value in _values(data):
        field = known.get(number)
        if field is not None and isinstance(value, bytes) == (field.kind is str):
            found[field.name] = _text(value) if isinstance(value, bytes) else field.kind(value)
    return message(**found)


def _values(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field numbers with a number or bytes each; fixed numbers are of no kind we have, and passed over."""
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        number, wire = tag >> 3, tag & 7
        if number == 0:
            raise _broken("a field has the number 0")
        match wire:
            case 0:
                value, at = _read_varint(data, at)
                yield number, value
            case 2:
                length, at = _read_varint(data, at)
                yield number, _slice(data, at, length)
                at += length
            case 1 | 5:
                at += len(_slice(data, at, 8 if wire == FIXED64 else 4))
            case _:
                raise _broken(f"there is no wire type {wire} in it")


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for position, byte in enumerate(_slice(data, at, 1, VARINT_BYTES_MAX)):
        value |= (byte & 0x7F) << 7 * position
        if byte < 0x80:
            return value & UINT64_MASK, at + position + 1
    raise _broken("a number does not end")


def _slice(data: bytes, at: int, least: int, most: int | None = None) -> bytes:
    part = data[at : at + (most or least)]
    if len(part) < least:
        raise _broken("it ends too early")
    return part


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise _broken("a text is not UTF-8") from None


def _broken(why: str) -> InvalidInput:
    return InvalidInput(f"The request is no protobuf message ({why}): send what the .proto file of this call says.")
