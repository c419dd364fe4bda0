"""Encoding of task arguments and results, converted to the types in the task's signature. No I/O.

Values are encoded as msgpack: plain values, datetimes, UUIDs, bytes, msgspec structs, dataclasses and pydantic models
(detected by their methods; pydantic is never imported). A parameter's annotation decides the type a task receives, the
return annotation the type of `Job.result`. Values without an annotation, or with `Any` or an annotation that cannot be
evaluated at run time, are passed through unchanged.
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
"""Types that msgpack supports natively."""
_EXACT_TYPES: Final = frozenset({bool, bytes, float, int, str})
_UNTYPED: Final = (Any, object, inspect.Parameter.empty)


def encode_value(value: object) -> bytes:
    """Raises TypeError, ValueError or OverflowError for values that cannot be encoded."""
    return msgspec.msgpack.encode(value, enc_hook=encode_hook)


def to_msgpack_value(value: object) -> Any:
    """Converts to lists, maps and native msgpack types."""
    return msgspec.to_builtins(value, builtin_types=NATIVE_TYPES, enc_hook=encode_hook)


def encode_hook(value: Any) -> object:
    """msgspec hook for unsupported types; TypeError if the value cannot be encoded."""
    if isinstance(value, DeferredValue):
        return str(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "model_dump") and hasattr(type(value), "model_validate"):
        return value.model_dump(by_alias=True)
    raise TypeError(
        f"the type {type(value).__name__} is not supported: pass plain values, dataclasses, msgspec or pydantic models"
    )


def _decode_hook(kind: Any, value: Any) -> Any:
    """msgspec hook for types it does not support."""
    if hasattr(kind, "model_validate"):
        return _validate_pydantic(kind, value)
    base = get_origin(kind) or kind
    try:
        if isinstance(value, base):
            return value
        if issubclass(base, os.PathLike) and isinstance(value, str):
            return (Path if inspect.isabstract(base) else base)(value)
    except TypeError:
        return value  # not usable with isinstance, such as a protocol
    raise ValueError(f"Expected `{base.__name__}`, got `{type(value).__name__}`")


def _validate_pydantic(kind: Any, value: Any) -> Any:
    try:
        return kind.model_validate(value)
    except ValueError as error:
        errors = getattr(error, "errors", None)
        if errors is None:
            raise
        messages = (f"{each['msg']} - at `{'.'.join(map(str, ('$', *each['loc'])))}`" for each in errors())
        raise ValueError("; ".join(messages)) from error


class ParameterConverter:
    """Converts the values of one parameter."""

    __slots__ = ("_exact", "_kind", "_name")

    def __init__(self, name: str, kind: Any) -> None:
        self._name = name
        self._kind = kind
        self._exact = kind if isinstance(kind, type) and kind in _EXACT_TYPES else None

    def convert(self, value: Any) -> Any:
        """Converts `value`, or raises `msgspec.ValidationError` with the parameter's name."""
        if type(value) is self._exact:
            return value
        try:
            return msgspec.convert(value, self._kind, dec_hook=_decode_hook)
        except (Exception, SystemExit) as error:  # validators and __post_init__ may raise anything
            reason = str(error) or type(error).__name__
            raise msgspec.ValidationError(f"{self._name} does not fit: {reason}") from error


class Signature:
    """Parameters and return type of a task.

    Annotations are evaluated on first use, because they may refer to names defined later in the module.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @cached_property
    def _signature(self) -> inspect.Signature | None:
        try:
            return inspect.signature(self._function)
        except (TypeError, ValueError):
            return None  # some C functions have no signature

    @cached_property
    def _plain_names(self) -> tuple[frozenset[str], frozenset[str]] | None:
        """Names of all parameters and of required ones, if all can be passed by name and by position."""
        parameters = list(self._signature.parameters.values()) if self._signature is not None else []
        if any(each.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD for each in parameters):
            return None
        required = (each.name for each in parameters if each.default is inspect.Parameter.empty)
        return frozenset(each.name for each in parameters), frozenset(required)

    @cached_property
    def _hints(self) -> Mapping[str, Any]:
        try:
            return get_type_hints(self._function, include_extras=True)
        except Exception:  # noqa: BLE001 - annotations are arbitrary expressions; some names exist only for type checkers
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
        """Converters of positional parameters, *args, named parameters and **kwargs."""
        positional: list[ParameterConverter | None] = []
        names: dict[str, ParameterConverter | None] = {}
        rest: ParameterConverter | None = None
        keyword_rest: ParameterConverter | None = None
        for name, parameter in self._signature.parameters.items() if self._signature is not None else ():
            converter = self._converter(name)
            match parameter.kind:
                case inspect.Parameter.VAR_POSITIONAL:
                    rest = converter
                case inspect.Parameter.VAR_KEYWORD:
                    keyword_rest = converter
                case inspect.Parameter.POSITIONAL_ONLY:
                    positional.append(converter)
                case inspect.Parameter.KEYWORD_ONLY:
                    names[name] = converter
                case _:
                    positional.append(converter)
                    names[name] = converter
        return positional, rest, names, keyword_rest

    def _converter(self, name: str) -> ParameterConverter | None:
        kind = _convertible_type(self._hints.get(name, Any))
        return None if kind in _UNTYPED else ParameterConverter(name, kind)

    @cached_property
    def _result_decoder(self) -> msgspec.msgpack.Decoder[Any]:
        return msgspec.msgpack.Decoder(_convertible_type(self._hints.get("return", Any)), dec_hook=_decode_hook)

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raises TypeError if the arguments do not fit the signature."""
        if self._signature is not None and not self._fits_plainly(args, kwargs):
            self._signature.bind(*args, **kwargs)

    def _fits_plainly(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether the arguments certainly fit. `bind` takes as long as all else that runs a short task."""
        if self._plain_names is None or (args and kwargs):
            return False
        names, required = self._plain_names
        return required <= kwargs.keys() <= names if not args else len(required) <= len(args) <= len(names)

    def convert_arguments(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Converts arguments; `msgspec.ValidationError` names the one that does not fit."""
        positional, rest, names, keyword_rest = self._converters
        if rest is None and keyword_rest is None and not any(positional) and not any(names.values()):
            return args, kwargs
        padded = (positional[at] if at < len(positional) else rest for at in range(len(args)))
        converted = [
            value if converter is None else converter.convert(value)
            for converter, value in zip(padded, args, strict=True)
        ]
        named = ((name, names.get(name, keyword_rest), value) for name, value in kwargs.items())
        return converted, {
            name: value if converter is None else converter.convert(value) for name, converter, value in named
        }

    def decode_result(self, data: bytes) -> Any:
        """Raises `msgspec.DecodeError` if the value does not fit the return annotation."""
        return self._result_decoder.decode(data)

    def parameter_names(self, count: int) -> list[str] | None:
        """Names of the first `count` parameters; None if not all can be passed by name."""
        parameters = list(self._signature.parameters.values())[:count] if self._signature is not None else []
        named = [each.name for each in parameters if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        return named if len(named) == count else None

    def bind_arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Given arguments by parameter name; raises TypeError if they do not fit."""
        if self._signature is None:
            return {str(at): value for at, value in enumerate(args)} | dict(kwargs)
        return dict(self._signature.bind_partial(*args, **kwargs).arguments)


def _convertible_type(kind: Any) -> Any:
    """A type that values can be converted to, or Any."""
    try:
        if kind not in _UNTYPED:
            msgspec.msgpack.Decoder(kind, dec_hook=_decode_hook)
    except Exception:  # noqa: BLE001 - msgspec does not support this type
        return Any
    return kind
