"""Placeholders for values of a run while its workflow is declared; operations on them build expressions. No I/O.

For a type checker a placeholder has the type of the value, so mismatched steps are found before anything runs. It is a
reference: `flight.output.ticket` is `${steps.flight.output.ticket}`, `nights > 2` is `${input.nights > 2}`, also when
formatted into a text. Operations that need the value now, such as `if`, are refused.
"""

from __future__ import annotations

import re
from typing import Any, Final, NoReturn

import msgspec

from rota.model.errors import InvalidInput

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_CEL_RESERVED: Final = frozenset(
    {"as", "break", "const", "continue", "else", "false", "for", "function", "if", "import", "in", "let", "loop"}
    | {"namespace", "null", "package", "return", "true", "var", "void", "while"}
)
"""Reserved words of CEL."""


class DeferredValue:
    """Workflow parameters and step outputs during declaration; not constructed by user code."""

    __slots__ = ("_expression", "_whole")

    def __init__(self, expression: str, *, whole: bool = True) -> None:
        self._expression = expression
        self._whole = whole
        """Whether it needs no parentheses inside a longer expression."""

    def __str__(self) -> str:
        return f"${{{self._expression}}}"

    __repr__ = __str__  # so that f"{city!r}" is the reference, too

    def __format__(self, spec: str) -> str:
        if spec:
            raise InvalidInput(f"{self._name()} is not known yet and cannot be formatted as {spec!r}: do it in a task.")
        return str(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return DeferredValue(f"{_operand(self)}{_accessor(name)}")

    def __getitem__(self, key: object) -> Any:
        if (
            isinstance(key, bool)
            or not isinstance(key, (str, int, DeferredValue))
            or (isinstance(key, int) and key < 0)
        ):
            raise InvalidInput(f"{self._name()} is not known yet: index it with a key, or a position from 0.")
        return DeferredValue(f"{_operand(self)}{_accessor(key) if isinstance(key, str) else f'[{to_expression(key)}]'}")

    def __eq__(self, other: object) -> Any:
        return _binary_operation(self, "==", other)

    def __ne__(self, other: object) -> Any:
        return _binary_operation(self, "!=", other)

    def __lt__(self, other: object) -> Any:
        return _binary_operation(self, "<", other)

    def __le__(self, other: object) -> Any:
        return _binary_operation(self, "<=", other)

    def __gt__(self, other: object) -> Any:
        return _binary_operation(self, ">", other)

    def __ge__(self, other: object) -> Any:
        return _binary_operation(self, ">=", other)

    def __add__(self, other: object) -> Any:
        return _binary_operation(self, "+", other)

    def __radd__(self, other: object) -> Any:
        return _binary_operation(other, "+", self)

    def __sub__(self, other: object) -> Any:
        return _binary_operation(self, "-", other)

    def __rsub__(self, other: object) -> Any:
        return _binary_operation(other, "-", self)

    def __mul__(self, other: object) -> Any:
        return _binary_operation(self, "*", other)

    def __rmul__(self, other: object) -> Any:
        return _binary_operation(other, "*", self)

    def __and__(self, other: object) -> Any:
        return _binary_operation(self, "&&", other)

    def __rand__(self, other: object) -> Any:
        return _binary_operation(other, "&&", self)

    def __or__(self, other: object) -> Any:
        return _binary_operation(self, "||", other)

    def __ror__(self, other: object) -> Any:
        return _binary_operation(other, "||", self)

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> NoReturn:
        raise InvalidInput(
            f"{self._name()} is not known yet, so it cannot be tested here: use when=, a switch or a"
            " condition, with & and | for `and` and `or`."
        )

    def __iter__(self) -> NoReturn:
        raise InvalidInput(f"{self._name()} is not known yet and cannot be iterated: use each(), or a task.")

    def __contains__(self, _item: object) -> NoReturn:
        raise InvalidInput(f"{self._name()} is not known yet and cannot be searched: use an expression as text.")

    def __len__(self) -> NoReturn:
        raise InvalidInput(f"{self._name()} is not known yet: use the text 'size({self._expression})' for its length.")

    def __call__(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise InvalidInput(f"{self._name()} is not known yet and cannot be called: do it in a task.")

    def _unknown(self, *_others: object) -> NoReturn:
        raise InvalidInput(f"{self._name()} is not known yet and does not support this operation: do it in a task.")

    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _unknown
    __int__ = __float__ = __index__ = __invert__ = __neg__ = __abs__ = __round__ = __setitem__ = __delitem__ = _unknown

    def _name(self) -> str:
        return f"The value of {self._expression[:100]}"


def is_deferred(value: object) -> bool:
    return isinstance(value, DeferredValue)


def reference_to(*parts: str) -> DeferredValue:
    """A reference to a name and its members."""
    first, *rest = parts
    return DeferredValue(first + "".join(map(_accessor, rest)))


def to_expression(value: object) -> str:
    """The CEL text of a value."""
    if isinstance(value, DeferredValue):
        return value._expression  # noqa: SLF001 - same module
    return msgspec.json.encode(to_json_value(value, "A part of an expression")).decode()


def checked_expression(condition: object, what: str) -> str:
    """The text of an expression given as text or as a value of a run."""
    if isinstance(condition, bool):
        raise InvalidInput(
            f"{what} is always {condition}: compare inputs and outputs of the run, or use an expression."
        )
    return condition if isinstance(condition, str) else to_expression(condition)


def to_json_value(value: object, what: str) -> Any:
    """Converts to JSON types, with `${…}` for values of a run; raises InvalidInput if it cannot be encoded."""
    from rota.sdk.payload import encode_hook

    try:
        return msgspec.to_builtins(value, enc_hook=encode_hook, str_keys=True)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidInput(f"{what} cannot be encoded: {str(error)[:300].rstrip('.')}.") from error


def _binary_operation(left: object, sign: str, right: object) -> DeferredValue:
    return DeferredValue(f"{_operand(left)} {sign} {_operand(right)}", whole=False)


def _operand(value: object) -> str:
    if isinstance(value, DeferredValue) and not value._whole:  # noqa: SLF001
        return f"({value._expression})"  # noqa: SLF001
    return to_expression(value)


def _accessor(name: str) -> str:
    return f".{name}" if _IDENTIFIER.fullmatch(name) and name not in _CEL_RESERVED else f"[{to_expression(name)}]"
