"""Expressions and templates of workflows. No I/O.

`${steps.a.output.total}` is a path and is walked here; anything else between the braces is CEL, which is loaded when it
is first needed. A text that is one expression has its value, in any other text the value is written out. CEL has no
loops but its comprehensions: they cannot be nested, and what they go over is bounded, so every expression ends soon.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final

import msgspec

from rota.model.errors import InvalidInput

TEXT_MAX: Final = 4096
LIST_MAX: Final = 10_000
VALUE_BYTES_MAX: Final = 256 * 1024
COMPREHENSIONS_MAX: Final = 8
ROOTS: Final = frozenset({"input", "steps", "run", "round", "item"})
"""What an expression may name."""

_PATH = re.compile(r"\s*[A-Za-z_]\w*(?:\.[A-Za-z_]\w*|\[\d{1,6}\])*\s*", re.ASCII)
_PART = re.compile(r"[A-Za-z_]\w*|\d+", re.ASCII)
_STRING = re.compile(r"[rRbB]?(?:\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*')")
_STEP = re.compile(r"\bsteps\s*(?:\.\s*([A-Za-z_]\w*)|\[\s*[\"']([^\"']+)[\"']\s*\])", re.ASCII)
_COMPREHENSION = re.compile(r"\.\s*(?:all|exists|exists_one|filter|map)\s*\(")
_WORDS_OF_CEL: Final = frozenset({"true", "false", "null"})

Scope = Mapping[str, Any]
Evaluate = Callable[[Scope], Any]


class Failed(Exception):
    """An expression that could not be evaluated, in a sentence."""


def expression(text: str, what: str) -> Evaluate:
    """What `text` means; InvalidInput if it means nothing. Raises `Failed` when it is evaluated in vain."""
    if not text.strip() or len(text) > TEXT_MAX:
        raise InvalidInput(f"The expression of {what} has {len(text)} characters: use 1 to {TEXT_MAX}.")
    if _PATH.fullmatch(text) and text.strip() not in _WORDS_OF_CEL:
        return _path(text, what)
    _check_loops(text, what)
    return _cel(text, what)


def steps_in(text: str) -> Iterator[str]:
    """Steps whose state or output an expression names."""
    for found in _STEP.finditer(text):
        yield found[1] or found[2]


def template(value: Any, what: str) -> Evaluate | None:
    """What a value with `${…}` in it becomes; None: it has none, and is what it is."""
    match value:
        case str():
            return _text(value, what)
        case dict():
            made = {key: template(each, what) for key, each in value.items()}
            if not any(made.values()):
                return None
            return lambda scope: {key: run(scope) if (run := made[key]) else value[key] for key in value}
        case list() | tuple():
            parts = [template(each, what) for each in value]
            if not any(parts):
                return None
            return lambda scope: [
                run(scope) if run is not None else each for run, each in zip(parts, value, strict=True)
            ]
        case _:
            return None


def texts_in(value: Any) -> Iterator[str]:
    """Expressions in a value with `${…}` in it."""
    match value:
        case str():
            yield from (inner for is_expression, inner in _pieces(value, "text") if is_expression)
        case dict():
            for each in value.values():
                yield from texts_in(each)
        case list() | tuple():
            for each in value:
                yield from texts_in(each)


def checked_value(value: Any, what: str) -> Any:
    """`value`, or Failed when it is too large to be passed on."""
    try:
        size = len(msgspec.msgpack.encode(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Failed(f"The {what} cannot be passed on: {error}.") from error
    if size > VALUE_BYTES_MAX:
        raise Failed(f"The {what} has {size} bytes, at most {VALUE_BYTES_MAX} can be passed on: pass a pointer to it.")
    return value


def _text(value: str, what: str) -> Evaluate | None:
    pieces = list(_pieces(value, what))
    if not any(is_expression for is_expression, _ in pieces):
        if "$${" not in value:
            return None
        plain = "".join(text for _, text in pieces)
        return lambda _scope: plain
    if len(pieces) == 1:
        return expression(pieces[0][1], what)
    made = [(expression(text, what) if is_expression else None, text) for is_expression, text in pieces]
    return lambda scope: "".join(shown(run(scope)) if run is not None else text for run, text in made)


def _pieces(value: str, what: str) -> Iterator[tuple[bool, str]]:
    """Plain text and expressions, in their order. `$${` is a plain `${`."""
    at = 0
    plain = ""
    while (begin := value.find("${", at)) >= 0:
        if begin > 0 and value[begin - 1] == "$":
            plain += value[at : begin - 1] + "${"
            at = begin + 2
            continue
        plain += value[at:begin]
        end = _end(value, begin + 2)
        if end < 0:
            raise InvalidInput(f"An expression of {what} has no end: close its brace, or write $${{ for a plain one.")
        if plain:
            yield False, plain
            plain = ""
        yield True, value[begin + 2 : end]
        at = end + 1
    if plain + value[at:]:
        yield False, plain + value[at:]


def _end(value: str, at: int) -> int:
    """Where the brace closes that was opened before `at`; those in strings do not count."""
    depth = 1
    while at < len(value):
        if (quoted := _STRING.match(value, at)) is not None and value[at] in "\"'rRbB":
            at = quoted.end()
            continue
        depth += {"{": 1, "}": -1}.get(value[at], 0)
        if depth == 0:
            return at
        at += 1
    return -1


def _path(text: str, what: str) -> Evaluate:
    parts: list[str | int] = [int(part) if part[0].isdigit() else part for part in _PART.findall(text)]
    root = parts[0]
    if root not in ROOTS:
        raise InvalidInput(
            f"The expression {_told(text)} of {what} names {root!r}: use one of {', '.join(sorted(ROOTS))}."
        )

    def walk(scope: Scope) -> Any:
        value: Any = scope
        for part in parts:
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                raise Failed(f"The expression {_told(text)} has no value: there is no {part!r}.") from None
        return value

    return walk


def _check_loops(text: str, what: str) -> None:
    bare = _STRING.sub(lambda found: " " * len(found[0]), text)
    found = list(_COMPREHENSION.finditer(bare))
    if len(found) > COMPREHENSIONS_MAX:
        raise InvalidInput(f"The expression of {what} has {len(found)} loops: use at most {COMPREHENSIONS_MAX}.")
    for begin, after in pairwise(found):
        depth = 1
        for letter in bare[begin.end() : after.start()]:
            depth += {"(": 1, ")": -1}.get(letter, 0)
            if depth == 0:
                break
        else:
            raise InvalidInput(f"The expression {_told(text)} of {what} loops inside a loop: do it in a task.")


@lru_cache(maxsize=4096)
def _cel(text: str, what: str) -> Evaluate:
    import cel

    try:
        program = cel.compile(text)
    except ValueError as error:
        told = str(error).partition("ERROR: ")[2].partition("\n")[0] or str(error)
        raise InvalidInput(f"The expression {_told(text)} of {what} cannot be read: {told[:200]}.") from None
    names = sorted(program.variables())
    if unknown := [name for name in names if name not in ROOTS and not _bound(text, name)]:
        raise InvalidInput(
            f"The expression {_told(text)} of {what} names {unknown[0]!r}: use one of {', '.join(sorted(ROOTS))}."
        )
    wanted = [name for name in names if name in ROOTS]

    def run(scope: Scope) -> Any:
        given = {name: scope[name] for name in wanted if name in scope}
        _check_lists(given, text)
        try:
            return program.execute(given)
        except Exception as error:  # noqa: BLE001 - the library raises whatever fits; told to who wrote the expression
            raise Failed(
                f"The expression {_told(text)} has no value: {type(error).__name__}: {str(error)[:200]}."
            ) from None

    return run


def _bound(text: str, name: str) -> bool:
    """Whether it is the variable of a comprehension."""
    return re.search(rf"\(\s*{re.escape(name)}\s*,", text) is not None


def _check_lists(value: Any, text: str) -> None:
    match value:
        case list() | tuple():
            if len(value) > LIST_MAX:
                raise Failed(
                    f"The expression {_told(text)} is given a list of {len(value)}: at most {LIST_MAX} are allowed."
                )
            for each in value:
                if isinstance(each, (list, tuple, dict)):
                    _check_lists(each, text)
        case dict():
            for each in value.values():
                if isinstance(each, (list, tuple, dict)):
                    _check_lists(each, text)


def shown(value: Any) -> str:
    """A value, written out."""
    if isinstance(value, str):
        return value
    return msgspec.json.encode(value).decode()


def _told(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
