"""CEL expressions with a cost bound computed before evaluation, so that no evaluation needs a timeout. No I/O.

The only loops of CEL are comprehensions, and nested ones are refused. The remaining cost is estimated for the actual
values and refused beyond `COST_MAX` (about half a second); the same values always give the same result. The estimate
includes that `map` and `filter` copy their result for every item, and that a text or list added to itself grows. An
expression receives only the values it names. All expressions of one advance share `ADVANCE_COST_MAX`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import msgspec

from rota.model.errors import InvalidInput

if TYPE_CHECKING:
    import cel

LIST_MAX: Final = 10_000
COMPREHENSIONS_MAX: Final = 8
MATCHES_MAX: Final = 8
COST_MAX: Final = 2_000_000
ADVANCE_COST_MAX: Final = 5 * COST_MAX
METER_KEY: Final = ""
"""Key under which a scope holds the `CostMeter` shared by its expressions."""
CALL_COST: Final = 50
ROOTS: Final = frozenset({"input", "steps", "run", "round", "item"})
"""Names an expression may use."""
FUNCTIONS: Final = frozenset(
    {
        "size",
        "contains",
        "startsWith",
        "endsWith",
        "matches",
        "int",
        "uint",
        "double",
        "string",
        "bytes",
        "bool",
        "type",
    }
    | {"duration", "timestamp", "getFullYear", "getMonth", "getDate", "getDayOfMonth", "getDayOfWeek", "getDayOfYear"}
    | {"getHours", "getMinutes", "getSeconds", "getMilliseconds", "dyn"}
)

STRING_LITERAL: Final = re.compile(
    r"""[bB]?[rR](?:"{3}.*?"{3}|'{3}.*?'{3}|"[^"\n]*"|'[^'\n]*')"""
    r"""|[bB]?(?:"{3}(?:\\.|.)*?"{3}|'{3}(?:\\.|.)*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')""",
    re.DOTALL,
)
_COMPREHENSION: Final = re.compile(r"\.\s*(all|exists|exists_one|existsOne|filter|map)\s*\(\s*(\w*)")
_MENTION: Final = re.compile(
    r"(?<![\w.])(?:input|steps|run|round|item)\b"
    r"""(?:\s*\.\s*[A-Za-z_]\w*(?!\w)(?!\s*\()|\s*\[\s*(?:\d{1,6}|"[^"\\\n]*"|'[^'\\\n]*')\s*\])*""",
    re.ASCII,
)
_PART: Final = re.compile(r"""[A-Za-z_]\w*|\d+|"[^"]*"|'[^']*'""", re.ASCII)
_TEXT_UNIT: Final = 256
"""Characters that cost as much as one number."""

Path = tuple[str | int, ...]


class ExpressionError(Exception):
    """An expression could not be evaluated; the message is a sentence."""


class CostMeter:
    """Remaining cost of the expressions of one advance."""

    def __init__(self, left: int = ADVANCE_COST_MAX) -> None:
        self.left = left

    def spend(self, cost: int) -> None:
        self.left -= cost
        if self.left < 0:
            raise ExpressionError(
                "The expressions of this run would take too long together: move the work into a task."
            )


class Comprehension(msgspec.Struct, frozen=True):
    copies: bool
    """Whether it creates a list, which is copied for every item."""
    uses: int
    """How often its body uses the item."""
    length: int
    """Of the text evaluated for each item."""
    mentions: tuple[Path, ...]


class ExpressionShape(msgspec.Struct, frozen=True):
    """The parts of an expression's cost that do not depend on values."""

    mentions: tuple[Path, ...]
    loops: tuple[Comprehension, ...]
    literals: int
    pluses: int


@lru_cache(maxsize=4096)
def evaluator(text: str, what: str) -> Callable[[Mapping[str, Any]], Any]:
    """Compile `text`; raises InvalidInput if it is invalid or cannot be bounded."""
    shape = analyze(text, what)
    program = _program(text, what)

    def run(scope: Mapping[str, Any]) -> Any:
        variables, found = _select_mentioned(scope, shape.mentions)
        cost = estimate_cost(shape, found, text)
        meter = scope.get(METER_KEY)
        if meter is not None:
            meter.spend(cost)
        try:
            return program.execute(variables)
        except Exception as error:  # noqa: BLE001 - the library raises many types; reported to the author of the expression
            raise ExpressionError(
                f"The expression {quote_expression(text)} has no value: {type(error).__name__}: {str(error)[:200]}."
            ) from None

    return run


def analyze(text: str, what: str) -> ExpressionShape:
    bare = STRING_LITERAL.sub(lambda found: '"' + " " * (len(found[0]) - 2) + '"', text)
    if "//" in bare:
        raise InvalidInput(f"The expression {quote_expression(text)} of {what} contains a comment: remove it.")
    if bare.count("matches") > MATCHES_MAX:
        raise InvalidInput(f"The expression of {what} has {bare.count('matches')} matches: use at most {MATCHES_MAX}.")
    loops = tuple(_comprehensions(text, bare, what))
    mentions = tuple(_mentions(text, bare))
    if ("steps",) in mentions:
        raise InvalidInput(f"The expression {quote_expression(text)} of {what} reads all steps: name the one it needs.")
    return ExpressionShape(
        mentions=mentions,
        loops=loops,
        literals=bare.count(",") + 1,
        pluses=bare.count("+"),
    )


def estimate_cost(shape: ExpressionShape, found: Mapping[Path, Any], text: str) -> int:
    """Upper bound of the values read or copied; raises ExpressionError if it is too high."""
    measured = {path: _measure(value, text) for path, value in found.items()}
    mentioned = sum(measured[path][0] for path in shape.mentions)
    longest = max((longest for _, longest in measured.values()), default=0)
    length, whole = max(longest, shape.literals), mentioned + shape.literals
    cost = CALL_COST + whole * (1 + shape.pluses)
    for loop in shape.loops:
        each = loop.length // 8 + sum(measured[path][0] for path in loop.mentions)
        cost += length * each + whole
        if loop.copies:
            whole = whole * max(1, loop.uses) + length * each
            cost += length * whole // 2
    if cost > COST_MAX:
        raise ExpressionError(
            f"The expression {quote_expression(text)} would take too long for its input: move the work into a task."
        )
    return cost


def quote_expression(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _program(text: str, what: str) -> cel.Program:
    import cel

    try:
        program = cel.compile(text)
    except ValueError as error:
        why = str(error).partition("ERROR: ")[2].partition("\n")[0] or str(error)
        raise InvalidInput(f"The expression {quote_expression(text)} of {what} is not valid: {why[:200]}.") from None
    bound = {found[2] for found in _COMPREHENSION.finditer(text)}
    for name in sorted(program.variables()):
        if name not in ROOTS and name not in bound:
            use = ", ".join(sorted(ROOTS))
            raise InvalidInput(
                f"The expression {quote_expression(text)} of {what} reads {name[:64]!r}: use one of {use}."
            )
    for name in sorted(program.functions()):
        if name not in FUNCTIONS and name[0] not in "_@!-":
            raise InvalidInput(
                f"The expression {quote_expression(text)} of {what} calls {name[:64]!r}, which does not exist."
            )
    return program


def _comprehensions(text: str, bare: str, what: str) -> Iterator[Comprehension]:
    found = list(_COMPREHENSION.finditer(bare))
    if len(found) > COMPREHENSIONS_MAX:
        raise InvalidInput(f"The expression of {what} has {len(found)} loops: use at most {COMPREHENSIONS_MAX}.")
    for at, loop in enumerate(found):
        begin, end = loop.start(2), _closing_bracket(bare, loop.start(2))
        body = bare[begin:end]
        if at + 1 < len(found) and found[at + 1].start() < end:
            raise InvalidInput(
                f"The expression {quote_expression(text)} of {what} has a loop in a loop: move the work into a task."
            )
        if "matches" in body:
            raise InvalidInput(
                f"The expression {quote_expression(text)} of {what} has matches in a loop: move the work into a task."
            )
        yield Comprehension(
            copies=loop[1] in ("map", "filter"),
            uses=len(re.findall(rf"\b{loop[2]}\b", body)) - 1 if loop[1] == "map" and loop[2] else 1,
            length=len(body),
            mentions=tuple(_mentions(text[begin:end], body)),
        )


def _closing_bracket(bare: str, at: int) -> int:
    """Index of the bracket that closes the one before `at`."""
    depth = 1
    for end in range(at, len(bare)):
        depth += {"(": 1, ")": -1}.get(bare[end], 0)
        if depth == 0:
            return end
    return len(bare)


def _mentions(text: str, bare: str) -> Iterator[Path]:
    """Paths that the expression names, outside of string literals."""
    for found in _MENTION.finditer(text):
        if bare[found.start() : found.start() + 3] == text[found.start() : found.start() + 3]:
            yield tuple(_part(part) for part in _PART.findall(found[0]))


def _part(part: str) -> str | int:
    if part[0] in "\"'":
        return part[1:-1]
    return int(part) if part.isdigit() else part


def _select_mentioned(scope: Mapping[str, Any], mentions: Sequence[Path]) -> tuple[dict[str, Any], dict[Path, Any]]:
    """The named part of a scope, and its values by path; missing values are absent in both."""
    selected: dict[str, Any] = {}
    found: dict[Path, Any] = {}
    for path in sorted(set(mentions), key=len):
        value: Any = scope
        into: Any = selected
        for at, part in enumerate(path):
            if not isinstance(value, dict) or part not in value:
                break
            value = value[part]
            last = at + 1 == len(path) or not isinstance(value, dict) or path[at + 1] not in value
            into = _insert_part(into, part, value, whole=last)
            if into is None:
                break
        found[path] = value if value is not scope else None
    return selected, found


def _insert_part(into: dict[str, Any], part: str | int, value: Any, *, whole: bool) -> dict[str, Any] | None:
    """Insert a part into `into` and return the dict below it; None if the whole value was inserted."""
    if whole:
        into[str(part)] = value
        return None
    below = into.setdefault(str(part), {})
    return None if below is value else below


def _measure(value: Any, text: str) -> tuple[int, int]:
    """Number of values including itself, with long texts counting more; and the length of the longest list or map."""
    size = longest = 0
    pending = [value]
    while pending and size <= COST_MAX:
        each = pending.pop()
        size += 1
        match each:
            case str() | bytes():
                size += len(each) // _TEXT_UNIT
            case list() | tuple():
                _check_list(each, text)
                longest = max(longest, len(each))
                pending += each
            case dict():
                size += len(each)
                longest = max(longest, len(each))
                pending += each.values()
    return size, longest


def _check_list(value: Sequence[Any], text: str) -> None:
    if len(value) > LIST_MAX:
        raise ExpressionError(
            f"The expression {quote_expression(text)} reads a list of {len(value)} items: use at most {LIST_MAX}."
        )
