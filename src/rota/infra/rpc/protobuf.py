"""Protobuf's wire format, so that gRPC needs neither its runtime nor generated code (ADR 0012).

    class Show(ProtobufMessage, frozen=True):
        name: str = ""
        labels: dict[str, str] = {}
        pools: tuple[Pool, ...] = ()

The fields of a `ProtobufMessage` are those of its `.proto` file in the same order, numbered from 1; a test compares
them.

    str  string      int    uint64      an IntEnum     an enum, with 0 for unknown
    bool bool        float  double      a message      a message
    bytes bytes      X | None optional  tuple[X, ...]  repeated: of strings, bytes, messages
                                        dict[str, str] map<string, string>

The decoder follows the specification: fields come in any order, the last of several wins (also for messages: they are
not merged), unknown fields and other wire types are skipped, an unknown enum number becomes 0, and malformed bytes are
rejected. Message types are not recursive, so nesting is bounded by the type.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from enum import IntEnum
from functools import cache
from typing import Any, Final, TypeVar, get_args, get_origin

import msgspec

from rota.model.errors import InvalidInput

VARINT: Final = 0
FIXED64: Final = 1
BYTES: Final = 2
VARINT_BYTES_MAX: Final = 10
UINT64_MASK: Final = 2**64 - 1
_DOUBLE: Final = struct.Struct("<d")


class ProtobufMessage(msgspec.Struct, frozen=True):
    """Fields of the types above, all with defaults."""


MessageT = TypeVar("MessageT", bound=ProtobufMessage)


class ProtobufField(msgspec.Struct, frozen=True):
    name: str
    kind: type
    optional: bool = False
    many: bool = False
    mapped: bool = False

    @property
    def wire_type(self) -> int:
        if issubclass(self.kind, float):
            return FIXED64
        return VARINT if issubclass(self.kind, int) else BYTES


class MapEntry(ProtobufMessage, frozen=True):
    """One entry of a map."""

    key: str = ""
    value: str = ""


@cache
def fields(message: type[ProtobufMessage]) -> Mapping[int, ProtobufField]:
    """The fields by number."""
    return {number: _field(info.name, info.type) for number, info in enumerate(msgspec.structs.fields(message), 1)}


def _field(name: str, annotated: Any) -> ProtobufField:
    if get_origin(annotated) is dict:
        assert get_args(annotated) == (str, str), f"{name} maps values other than str"
        return ProtobufField(name, MapEntry, mapped=True)
    if get_origin(annotated) is tuple:
        kind = get_args(annotated)[0]
        assert issubclass(kind, str | bytes | ProtobufMessage), (
            f"{name} repeats numbers, which would need packed encoding"
        )
        return ProtobufField(name, kind, many=True)
    kinds = [kind for kind in get_args(annotated) or (annotated,) if kind is not type(None)]
    assert issubclass(kinds[0], str | bytes | bool | int | float | ProtobufMessage), (
        f"{name} has a type that cannot be encoded"
    )
    return ProtobufField(name, kinds[0], optional=type(None) in get_args(annotated))


def encode(message: ProtobufMessage) -> bytes:
    """Omits empty, 0 and false values, as proto3 requires, unless optional and set."""
    out = bytearray()
    _write(message, out)
    return bytes(out)


def _write(message: ProtobufMessage, out: bytearray) -> None:
    for name, optional, write in _writers(type(message)):
        value = getattr(message, name)
        if value or (optional and value is not None):
            write(value, out)


@cache
def _writers(message: type[ProtobufMessage]) -> tuple[tuple[str, bool, Callable[[Any, bytearray], None]], ...]:
    return tuple((field.name, field.optional, _writer(number, field)) for number, field in fields(message).items())


def _writer(number: int, field: ProtobufField) -> Callable[[Any, bytearray], None]:
    tag = _varint(number << 3 | field.wire_type)
    if field.mapped:
        return lambda pairs, out: _write_many(tag, _BODIES[MapEntry], [MapEntry(*pair) for pair in pairs.items()], out)
    if field.wire_type == VARINT:
        return lambda value, out: out.extend(tag + _varint(int(value)))
    if field.wire_type == FIXED64:
        return lambda value, out: out.extend(tag + _DOUBLE.pack(value))
    body = _BODIES[next(kind for kind in (str, bytes, ProtobufMessage) if issubclass(field.kind, kind))]
    if field.many:
        return lambda values, out: _write_many(tag, body, values, out)
    return lambda value, out: _write_many(tag, body, (value,), out)


def _write_many(tag: bytes, body: Callable[[Any], bytes], values: Any, out: bytearray) -> None:
    for value in values:
        encoded = body(value)
        out += tag
        out += _varint(len(encoded))
        out += encoded


_BODIES: Final[dict[type, Callable[[Any], bytes]]] = {
    str: str.encode,
    bytes: bytes,
    ProtobufMessage: encode,
    MapEntry: encode,
}


def _varint(value: int) -> bytes:
    assert 0 <= value <= UINT64_MASK, "numbers are unsigned 64-bit integers"
    if value < 0x80:
        return bytes((value,))
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def decode(data: bytes, message: type[MessageT]) -> MessageT:
    """Raises InvalidInput for malformed bytes."""
    readers = _readers(message)
    found: dict[str, Any] = {}
    at, end = 0, len(data)
    while at < end:
        tag, at = _read_varint(data, at)
        value, at = _value(data, at, tag)
        store = readers.get(tag)
        if store is not None:
            store(found, value)
    for name, value in found.items():
        if isinstance(value, list):
            found[name] = tuple(value)
    return message(**found)


@cache
def _readers(message: type[ProtobufMessage]) -> Mapping[int, Callable[[dict[str, Any], Any], None]]:
    """By tag: stores a value among the decoded fields. Other tags are unknown, or of another wire type."""
    return {number << 3 | field.wire_type: _reader(field) for number, field in fields(message).items()}


def _reader(field: ProtobufField) -> Callable[[dict[str, Any], Any], None]:
    name, read = field.name, _read(field.kind)

    def put(found: dict[str, Any], value: Any) -> None:
        found[name] = read(value)

    def add(found: dict[str, Any], value: Any) -> None:
        found.setdefault(name, []).append(read(value))

    def enter(found: dict[str, Any], value: Any) -> None:
        entry = read(value)
        found.setdefault(name, {})[entry.key] = entry.value

    return enter if field.mapped else add if field.many else put


def _read(kind: Any) -> Callable[[Any], Any]:
    if kind is str:
        return _text
    if issubclass(kind, ProtobufMessage):
        return lambda value: decode(value, kind)
    if issubclass(kind, IntEnum):
        known = {int(member): member for member in kind}
        return lambda value: known.get(value, kind(0))
    return kind if kind in (bool, int) else lambda value: value


def _value(data: bytes, at: int, tag: int) -> tuple[int | float | bytes, int]:
    """The value at `at`, and the start of the next field; 32-bit numbers have no type here."""
    if tag < 8:
        raise _malformed("a field has the number 0")
    match tag & 7:
        case 0:
            return _read_varint(data, at)
        case 2:
            length, at = _read_varint(data, at)
            return _slice(data, at, length), at + length
        case 1:
            return _DOUBLE.unpack(_slice(data, at, 8))[0], at + 8
        case 5:
            return _slice(data, at, 4), at + 4
        case wire:
            raise _malformed(f"wire type {wire} is unknown")


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    if at < len(data) and data[at] < 0x80:
        return data[at], at + 1
    value = 0
    for position, byte in enumerate(_slice(data, at, 1, VARINT_BYTES_MAX)):
        value |= (byte & 0x7F) << 7 * position
        if byte < 0x80:
            return value & UINT64_MASK, at + position + 1
    raise _malformed("a varint is not terminated")


def _slice(data: bytes, at: int, least: int, most: int | None = None) -> bytes:
    part = data[at : at + (most or least)]
    if len(part) < least:
        raise _malformed("it is truncated")
    return part


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise _malformed("a string is not UTF-8") from None


def _malformed(why: str) -> InvalidInput:
    return InvalidInput(f"The request is not a protobuf message ({why}): encode it as the .proto file declares.")
