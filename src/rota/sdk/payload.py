"""Values on their way into a task and out of it: what the signature says they are, they are. No I/O.

They travel as msgpack: plain values, datetimes, UUIDs, bytes, msgspec structs, dataclasses, and models of pydantic,
which is known by its methods and never imported. The annotation of a parameter decides what a task is given, that of
the function what `Job.result` returns. What has none, `Any`, or one that cannot be read when the program runs, is
passed on as it came.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final, get_origin, get_type_hints

import msgspec

from rota.sdk.workflow.deferred_values import DeferredValue

NATIVE_TYPES = (bytes, bytearray, memoryview, datetime)
"""Types for which msgpack has words of its own."""
_EXACT_TYPES: Final = frozenset({bool, bytes, float, int, str})
_UNTYPED: Final = (Any, object, inspect.Parameter.empty)


def encode_value(value: object) -> bytes:
    """Raises TypeError, ValueError or OverflowError for what cannot travel."""
    return msgspec.msgpack.encode(value, enc_hook=encode_hook)


def to_msgpack_value(value: object) -> Any:
    """The same in lists, maps and what msgpack has words for."""
    return msgspec.to_builtins(value, builtin_types=NATIVE_TYPES, enc_hook=encode_hook)


def encode_hook(value: Any) -> object:
    """What msgspec makes of a value that it does not know; TypeError for what cannot travel."""
    if isinstance(value, DeferredValue):
        return str(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "model_dump") and hasattr(type(value), "model_validate"):
        return value.model_dump(by_alias=True)
    raise TypeError(
        f"a {type(value).__name__} cannot travel; pass plain values, dataclasses, or models of msgspec or pydantic"
    )


def _decode_hook(kind: Any, value: Any) -> Any:
    """Of types that msgspec leaves to us."""
    if hasattr(kind, "model_validate"):
        return _validate_pydantic(kind, value)
    made_of = get_origin(kind) or kind
    try:
        if isinstance(value, made_of):
            return value
        if issubclass(made_of, os.PathLike) and isinstance(value, str):
            return (Path if inspect.isabstract(made_of) else made_of)(value)
    except TypeError:
        return value  # nothing that an object could be asked about, such as a protocol
    raise ValueError(f"Expected `{made_of.__name__}`, got `{type(value).__name__}`")


def _validate_pydantic(kind: Any, value: Any) -> Any:
    try:
        return kind.model_validate(value)
    except ValueError as error:
        told = getattr(error, "errors", None)
        if told is None:
            raise
        faults = (f"{each['msg']} - at `{'.'.join(map(str, ('$', *each['loc'])))}`" for each in told())
        raise ValueError("; ".join(faults)) from error


class ParameterConverter:
    """What one parameter takes."""

    __slots__ = ("_exact", "_kind", "_name")

    def __init__(self, name: str, kind: Any) -> None:
        self._name = name
        self._kind = kind
        self._exact = kind if isinstance(kind, type) and kind in _EXACT_TYPES else None

    def convert(self, value: Any) -> Any:
        """`value` as the parameter takes it, or `msgspec.ValidationError` that names the parameter."""
        if type(value) is self._exact:
            return value
        try:
            return msgspec.convert(value, self._kind, dec_hook=_decode_hook)
        except (Exception, SystemExit) as error:  # also of validators and __post_init__, which may raise anything
            told = str(error) or type(error).__name__
            raise msgspec.ValidationError(f"{self._name} does not fit: {told}") from error


class Signature:
    """How a task is called and what it returns. Annotations are read when first needed, since they may name what comes
    later in the module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @cached_property
    def _signature(self) -> inspect.Signature | None:
        try:
            return inspect.signature(self._function)
        except (TypeError, ValueError):
            return None  # of some functions written in C nothing is known

    @cached_property
    def _hints(self) -> Mapping[str, Any]:
        try:
            return get_type_hints(self._function, include_extras=True)
        except Exception:  # noqa: BLE001 - an annotation is any expression, and names may exist for type checkers alone
            return {}

    @cached_property
    def _converters(
        self,
    ) -> tuple[
        list[ParameterConverter | None],
        ParameterConverter | None,
        dict[str, ParameterConverter | None],
        ParameterConverter | None,
    ]:
        """Of positional parameters, the rest of these, named parameters, and the rest of those."""
        places: list[ParameterConverter | None] = []
        names: dict[str, ParameterConverter | None] = {}
        rest: ParameterConverter | None = None
        others: ParameterConverter | None = None
        for name, parameter in self._signature.parameters.items() if self._signature is not None else ():
            slot = self._converter(name)
            match parameter.kind:
                case inspect.Parameter.VAR_POSITIONAL:
                    rest = slot
                case inspect.Parameter.VAR_KEYWORD:
                    others = slot
                case inspect.Parameter.POSITIONAL_ONLY:
                    places.append(slot)
                case inspect.Parameter.KEYWORD_ONLY:
                    names[name] = slot
                case _:
                    places.append(slot)
                    names[name] = slot
        return places, rest, names, others

    def _converter(self, name: str) -> ParameterConverter | None:
        kind = _convertible_type(self._hints.get(name, Any))
        return None if kind in _UNTYPED else ParameterConverter(name, kind)

    @cached_property
    def _result_decoder(self) -> msgspec.msgpack.Decoder[Any]:
        return msgspec.msgpack.Decoder(_convertible_type(self._hints.get("return", Any)), dec_hook=_decode_hook)

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """TypeError when it cannot be called like this."""
        if self._signature is not None:
            self._signature.bind(*args, **kwargs)

    def convert_arguments(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Arguments as the parameters take them; `msgspec.ValidationError` says which does not fit."""
        places, rest, names, others = self._converters
        if rest is None and others is None and not any(places) and not any(names.values()):
            return args, kwargs
        padded = (places[at] if at < len(places) else rest for at in range(len(args)))
        fitted = [value if slot is None else slot.convert(value) for slot, value in zip(padded, args, strict=True)]
        named = ((name, names.get(name, others), value) for name, value in kwargs.items())
        return fitted, {name: value if slot is None else slot.convert(value) for name, slot, value in named}

    def decode_result(self, data: bytes) -> Any:
        """What the task returned; `msgspec.DecodeError` when it is not what it is said to return."""
        return self._result_decoder.decode(data)

    def parameter_names(self, count: int) -> list[str] | None:
        """Of the first parameters, as many; None when they cannot all be given by name."""
        parameters = list(self._signature.parameters.values())[:count] if self._signature is not None else []
        named = [each.name for each in parameters if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        return named if len(named) == count else None

    def bind_arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by the names of their parameters, those alone that are given; TypeError when they do not fit."""
        if self._signature is None:
            return {str(at): value for at, value in enumerate(args)} | dict(kwargs)
        return dict(self._signature.bind_partial(*args, **kwargs).arguments)


def _convertible_type(kind: Any) -> Any:
    """A type that values can be converted to, or Any."""
    try:
        if kind not in _UNTYPED:
            msgspec.msgpack.Decoder(kind, dec_hook=_decode_hook)
    except Exception:  # noqa: BLE001 - whatever is wrong with it, it says nothing about values
        return Any
    return kind
