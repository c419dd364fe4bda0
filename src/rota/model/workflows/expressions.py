"""Expressions and templates of workflows. No I/O.

`${steps.a.output.total}` is a path and is evaluated here; anything else in the braces is CEL, which is imported on
first use and bounded by `rota.model.cel_guard`. A text that is a single expression evaluates to its value; in any other
text, values are converted to text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from rota.model.cel_guard import STRING_LITERAL, WORKFLOW_LIMITS, ExpressionError, check_size, quote_expression
from rota.model.errors import InvalidInput
from rota.model.workflows.cel import ROOTS, WORKFLOW_DIALECT, evaluator

TEXT_MAX: Final = WORKFLOW_LIMITS.size_max
VALUE_BYTES_MAX: Final = 256 * 1024

_PATH = re.compile(r"\s*[A-Za-z_]\w*(?:\.[A-Za-z_]\w*|\[\d{1,6}\])*\s*", re.ASCII)
_PART = re.compile(r"[A-Za-z_]\w*|\d+", re.ASCII)
_STEP = re.compile(r"\bsteps\s*(?:\.\s*([A-Za-z_]\w*)|\[\s*[\"']([^\"']+)[\"']\s*\])", re.ASCII)
_CEL_LITERALS: Final = frozenset({"true", "false", "null"})

__all__ = [
    "Evaluate",
    "ExpressionError",
    "Scope",
    "compile_expression",
    "compile_template",
    "expressions_in",
    "steps_mentioned",
    "to_text",
    "validate_value",
]

Scope = Mapping[str, Any]
Evaluate = Callable[[Scope], Any]


def compile_expression(text: str, what: str) -> Evaluate:
    """Compile `text`; raises InvalidInput. The result raises `ExpressionError` when evaluation fails."""
    check_size(text, WORKFLOW_DIALECT, what)
    if _PATH.fullmatch(text) and text.strip() not in _CEL_LITERALS:
        return _compile_path(text, what)
    return evaluator(text, what)


def steps_mentioned(text: str) -> Iterator[str]:
    """Steps whose state or output an expression reads."""
    for found in _STEP.finditer(text):
        yield found[1] or found[2]


def compile_template(value: Any, what: str) -> Evaluate | None:
    """Compile a value that may contain `${…}`; None if it contains none and is constant."""
    match value:
        case str():
            return _compile_text(value, what)
        case dict():
            made = {key: compile_template(each, what) for key, each in value.items()}
            if not any(made.values()):
                return None
            return lambda scope: {key: run(scope) if (run := made[key]) else value[key] for key in value}
        case list() | tuple():
            parts = [compile_template(each, what) for each in value]
            if not any(parts):
                return None
            return lambda scope: [
                run(scope) if run is not None else each for run, each in zip(parts, value, strict=True)
            ]
        case _:
            return None


def expressions_in(value: Any) -> Iterator[str]:
    """All expressions in a value."""
    match value:
        case str():
            yield from (inner for is_expression, inner in _split(value, "text") if is_expression)
        case dict():
            for each in value.values():
                yield from expressions_in(each)
        case list() | tuple():
            for each in value:
                yield from expressions_in(each)


def validate_value(value: Any, what: str) -> Any:
    """`value`; raises ExpressionError if it is too large or cannot be encoded."""
    try:
        size = len(msgspec.msgpack.encode(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ExpressionError(f"The {what} cannot be passed on: {error}.") from error
    if size > VALUE_BYTES_MAX:
        raise ExpressionError(
            f"The {what} has {size} bytes, at most {VALUE_BYTES_MAX} can be passed on: pass a pointer to it."
        )
    return value


def _compile_text(value: str, what: str) -> Evaluate | None:
    pieces = list(_split(value, what))
    if not any(is_expression for is_expression, _ in pieces):
        if "$${" not in value:
            return None
        plain = "".join(text for _, text in pieces)
        return lambda _scope: plain
    if len(pieces) == 1:
        return compile_expression(pieces[0][1], what)
    compiled = [(compile_expression(text, what) if is_expression else None, text) for is_expression, text in pieces]
    return lambda scope: _join((to_text(run(scope)) if run is not None else text for run, text in compiled), what)


def _join(texts: Iterable[str], what: str) -> str:
    parts: list[str] = []
    size = 0
    for text in texts:
        parts.append(text)
        size += len(text)
        if size > VALUE_BYTES_MAX:
            raise ExpressionError(f"A text of {what} has more than {VALUE_BYTES_MAX} characters: pass a pointer to it.")
    return "".join(parts)


def _split(value: str, what: str) -> Iterator[tuple[bool, str]]:
    """Plain text and expressions in order, as (is_expression, text). `$${` is a literal `${`."""
    at = 0
    plain = ""
    while (begin := value.find("${", at)) >= 0:
        if begin > 0 and value[begin - 1] == "$":
            plain += value[at : begin - 1] + "${"
            at = begin + 2
            continue
        plain += value[at:begin]
        end = _closing_brace(value, begin + 2)
        if end < 0:
            raise InvalidInput(f"An expression of {what} is not closed: add the brace, or write $${{ for a plain ${{.")
        if plain:
            yield False, plain
            plain = ""
        yield True, value[begin + 2 : end]
        at = end + 1
    if plain + value[at:]:
        yield False, plain + value[at:]


def _closing_brace(value: str, at: int) -> int:
    """Index of the brace that closes the one before `at`, ignoring string literals; -1 if there is none."""
    depth = 1
    last = min(len(value), at + TEXT_MAX + 1)
    while at < last:
        if (quoted := STRING_LITERAL.match(value, at)) is not None and value[at] in "\"'rRbB":
            at = quoted.end()
            continue
        depth += {"{": 1, "}": -1}.get(value[at], 0)
        if depth == 0:
            return at
        at += 1
    return -1


def _compile_path(text: str, what: str) -> Evaluate:
    parts: list[str | int] = [int(part) if part[0].isdigit() else part for part in _PART.findall(text)]
    root = parts[0]
    if root not in ROOTS:
        raise InvalidInput(
            f"The expression {quote_expression(text)} of {what} reads {root!r}: use one of {', '.join(sorted(ROOTS))}."
        )

    def walk(scope: Scope) -> Any:
        value: Any = scope
        for part in parts:
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                raise ExpressionError(
                    f"The expression {quote_expression(text)} has no value: there is no {part!r}."
                ) from None
        return value

    return walk


def to_text(value: Any) -> str:
    """A value as text: strings unchanged, others as JSON."""
    if isinstance(value, str):
        return value
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ExpressionError(f"A {type(value).__name__} cannot be converted to text: {error}.") from error
