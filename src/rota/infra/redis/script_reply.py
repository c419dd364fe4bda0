"""Decodes a script's reply into the struct agreed between its header and the caller.

Each reply of the header corresponds to a frozen struct of the same name (`not_found` to `NotFound`) with the same
fields in the same order. This is checked when the script is loaded, so header and code cannot diverge unnoticed. A
reply that is not in the header is a bug in the script: it raises `AssertionError`.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Generic, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import inspect

from rota.infra.redis.script_contract import ReplyField, ScriptContract, ScriptReply

if TYPE_CHECKING:
    from typing_extensions import TypeForm

R = TypeVar("R")
Decode = Callable[[object], object]


class ReplyDecoder(Generic[R]):
    """Decodes the replies of one script into `R`, a struct or a union of structs."""

    def __init__(self, header: ScriptContract, replies: TypeForm[R]) -> None:
        structs = {_tag(struct): struct for struct in get_args(replies) or (replies,)}
        tags = {reply.tag for reply in header.replies}
        if structs.keys() != tags:
            raise TypeError(f"script {header.script} replies {sorted(tags)}, but the caller expects {sorted(structs)}")
        self._script = header.script
        self._make = {
            reply.tag.encode(): _struct_builder(header.script, structs[reply.tag], reply) for reply in header.replies
        }

    def decode(self, answer: object) -> R:
        try:
            assert isinstance(answer, list)
            return self._make[answer[0]](answer)  # type: ignore[return-value]  # one of the structs of R
        except (AssertionError, IndexError, KeyError, TypeError, ValueError) as error:
            raise AssertionError(f"script {self._script} answered {answer!r}, which is not in its header") from error


def _tag(struct: type) -> str:
    """The reply tag of `struct`: its msgspec tag, or else its name in snake case."""
    tag = struct.__struct_config__.tag if issubclass(struct, msgspec.Struct) else None
    if isinstance(tag, str):
        return tag
    return re.sub(r"(?<!^)(?=[A-Z])", "_", struct.__name__).lower()


def _struct_builder(script: str, struct: type, reply: ScriptReply) -> Callable[[list[object]], object]:
    if not issubclass(struct, msgspec.Struct) or not struct.__struct_config__.frozen:
        raise TypeError(f"script {script}: {struct.__name__} must be a frozen msgspec.Struct")
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    if [field.name for field in info.fields] != [field.name for field in reply.fields]:
        raise TypeError(f"script {script}: the fields of {struct.__name__} are not those of reply {reply.tag}")
    decoders = [_decoder(script, struct, *pair) for pair in zip(reply.fields, info.fields, strict=True)]

    def make(answer: list[object]) -> object:
        values = [decode(value) for decode, value in zip(decoders, answer[1:], strict=True)]
        return struct(*values)

    return make


def _decoder(script: str, struct: type, declared: ReplyField, field: inspect.Field) -> Decode:
    expected = field.type
    if declared.many:
        if not isinstance(expected, inspect.VarTupleType):
            raise TypeError(
                f"script {script}: {struct.__name__}.{field.name} must be tuple[…, ...]: the header has a list"
            )
        expected = expected.item_type
    decode = _decode_one(declared.type, expected, struct, field.name)
    if decode is None:
        raise TypeError(f"script {script}: {struct.__name__}.{field.name} is not {declared.type}, as in the header")
    return _list_decoder(decode) if declared.many else decode


def _decode_one(kind: str, expected: inspect.Type, struct: type, name: str) -> Decode | None:
    if kind == "packed":
        return _unpacker(struct, name)
    if isinstance(expected, inspect.EnumType):
        return _enum_decoder(kind, expected.cls)
    fitting, decode = _PLAIN[kind]
    return decode if isinstance(expected, fitting) else None


def _list_decoder(decode: Decode) -> Decode:
    def decode_all(value: object) -> object:
        assert isinstance(value, list)
        return tuple([decode(item) for item in value])

    return decode_all


def _unpacker(struct: type, name: str) -> Decode:
    decoder = msgspec.msgpack.Decoder(get_type_hints(struct)[name])

    def unpack(value: object) -> object:
        assert isinstance(value, bytes)
        return decoder.decode(value)

    return unpack


def _enum_decoder(kind: str, members: type[enum.Enum]) -> Decode | None:
    if kind == "str" and issubclass(members, str):
        return {member.value.encode(): member for member in members}.__getitem__
    if kind == "int" and issubclass(members, int):
        return members
    return None


def _int(value: object) -> object:
    assert value.__class__ is int
    return value


def _float(value: object) -> object:
    assert isinstance(value, bytes)
    return float(value)


def _bool(value: object) -> object:
    assert value in (0, 1)
    return value == 1


def _str(value: object) -> object:
    assert isinstance(value, bytes)
    return value.decode()


def _bytes(value: object) -> object:
    assert isinstance(value, bytes)
    return value


_PLAIN: Final[dict[str, tuple[type[inspect.Type], Decode]]] = {
    "int": (inspect.IntType, _int),
    "float": (inspect.FloatType, _float),
    "bool": (inspect.BoolType, _bool),
    "str": (inspect.StrType, _str),
    "bytes": (inspect.BytesType, _bytes),
}
