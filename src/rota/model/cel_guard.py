"""The guard of CEL: what an expression may contain and what its evaluation may cost. No I/O.

An evaluation cannot be interrupted, so its cost is bounded before it begins and no evaluation needs a timeout:

- `compile_guarded` refuses what a `CelDialect` does not list: variables, functions, loops (CEL's only loops are the
  macros `all`, `exists`, `exists_one`, `filter` and `map`), their nesting, comments, and texts that are too long or
  nested too deep. Nothing is looked for inside string literals.
- `GuardedExpression.evaluate` passes only the values that the expression names, and estimates the cost for them. Beyond
  `CelLimits.cost_max` it refuses, always for the same values. The estimate includes that `map` and `filter` copy their
  result for every item, that the body of a loop reads its values again for every item, and that a text or list added to
  itself grows.

`rota.model.workflows.cel` guards the expressions of tenants with it, `rota.policy.expressions` the conditions of a
policy file. The limits and texts of both are here, side by side.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final, assert_never

import msgspec

from rota.model.errors import InvalidInput

if TYPE_CHECKING:
    import cel

CALL_COST: Final = 50
"""Of an evaluation of any expression. One unit is one value read or copied: 0.05 to 0.25 µs."""
ADVANCE_COST_MAX: Final = 10_000_000
"""Of all expressions of one advance of a workflow run."""
OPERATORS: Final = frozenset(
    {"_&&_", "_||_", "!_", "_==_", "_!=_", "_<_", "_<=_", "_>_", "_>=_", "_[_]", "_?_:_", "@in", "@not_strictly_false"}
    | {"_+_", "_-_", "_*_", "_/_", "_%_", "-_"}
)
"""Names of the operators, and of those that macros expand to."""
LOOP_MACROS: Final = frozenset({"all", "exists", "exists_one", "existsOne", "filter", "map"})
_COPYING_MACROS: Final = frozenset({"filter", "map"})
_LITERAL_MATCHES: Final = "matches_re2"

STRING_LITERAL: Final = re.compile(
    r"""[bB]?[rR](?:"{3}.*?"{3}|'{3}.*?'{3}|"[^"\n]*"|'[^'\n]*')"""
    r"""|[bB]?(?:"{3}(?:\\.|.)*?"{3}|'{3}(?:\\.|.)*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')""",
    re.DOTALL,
)
_LOOP: Final = re.compile(rf"\.\s*({'|'.join(sorted(LOOP_MACROS, key=len, reverse=True))})\s*\(\s*(\w*)")
_MACRO_CALL: Final = re.compile(rf"\b({'|'.join(sorted(LOOP_MACROS))})\s*\(")
_MATCHES_CALL: Final = re.compile(r"\bmatches\s*\(\s*(?P<literal>\" *\")?\s*(?P<end>\))?")
_PATH: Final = (
    r"""(?:\s*\.\s*[A-Za-z_]\w*(?!\w)(?!\s*\()|\s*\[\s*(?:\d{1,6}|"[^"\\\n]*"|'[^'\\\n]*')\s*\])*"""
    # Members and constant indexes; the name of a method is not part of a path.
)
_PART: Final = re.compile(r"""[A-Za-z_]\w*|\d+|"[^"]*"|'[^']*'""", re.ASCII)
_TEXT_UNIT: Final = 256
"""Characters that cost as much as one number."""
_BODY_UNIT: Final = 8
"""Characters of the body of a loop that cost as much as one value, for every item."""

Path = tuple[str | int, ...]


class Violation(StrEnum):
    """What is wrong with an expression. The first group is found at compile time, the second by an evaluation."""

    BLANK = "blank"
    SIZE = "size"
    COMMENT = "comment"
    BRACKETS = "brackets"
    MACRO = "macro"
    LOOPS = "loops"
    LOOP_DEPTH = "loop_depth"
    MATCHES_COUNT = "matches_count"
    MATCHES_IN_LOOP = "matches_in_loop"
    PATTERN_NOT_LITERAL = "pattern_not_literal"
    INVALID_LITERAL = "invalid_literal"
    INVALID = "invalid"
    VARIABLE = "variable"
    FUNCTION = "function"

    COST = "cost"
    LIST = "list"
    NO_VALUE = "no_value"


SENTENCES: Final[Mapping[Violation, str]] = {
    Violation.BLANK: "The expression of {what} has {count} characters: use 1 to {limit}.",
    Violation.SIZE: "The expression of {what} has {count} characters: use 1 to {limit}.",
    Violation.COMMENT: "The expression {quoted} of {what} contains a comment: remove it.",
    Violation.BRACKETS: "The expression {quoted} of {what} is not valid: its brackets nest more than {limit} deep.",
    Violation.LOOPS: "The expression of {what} has {count} loops: use at most {limit}.",
    Violation.LOOP_DEPTH: "The expression {quoted} of {what} has a loop in a loop: move the work into a task.",
    Violation.MATCHES_COUNT: "The expression of {what} has {count} matches: use at most {limit}.",
    Violation.MATCHES_IN_LOOP: "The expression {quoted} of {what} has matches in a loop: move the work into a task.",
    Violation.INVALID: "The expression {quoted} of {what} is not valid: {why}.",
    Violation.VARIABLE: "The expression {quoted} of {what} reads {name!r}{hint}.",
    Violation.FUNCTION: "The expression {quoted} of {what} calls {name!r}, which does not exist.",
    Violation.COST: "The expression {quoted} would take too long for its input: move the work into a task.",
    Violation.LIST: "The expression {quoted} reads a list of {count} items: use at most {limit}.",
    Violation.NO_VALUE: "The expression {quoted} has no value: {kind}: {detail}.",
}
"""For expressions of a workflow: `what` names the step."""

PHRASES: Final[Mapping[Violation, str]] = {
    Violation.BLANK: "this is not valid CEL: it is blank",
    Violation.SIZE: "an expression can have at most {limit} bytes",
    Violation.COMMENT: "an expression cannot have comments: write them as YAML comments",
    Violation.BRACKETS: "the brackets of an expression can nest at most {limit} deep",
    Violation.MACRO: "`{name}` is not supported: use all, exists, exists_one or filter",
    Violation.LOOP_DEPTH: "all, exists, exists_one and filter can nest at most {limit} deep",
    Violation.PATTERN_NOT_LITERAL: "matches takes one string literal, such as topic.matches('^job')",
    Violation.INVALID_LITERAL: "{literal} is not a valid string literal",
    Violation.INVALID: "this is not valid CEL: {why}",
    Violation.VARIABLE: "{name!r} is not a field of a job{hint}",
    Violation.FUNCTION: "the function {name!r} is not supported",
    Violation.COST: "it is too expensive for lists of this length",
    Violation.NO_VALUE: "{reason}",
}
"""For conditions of a policy file: the loader puts the file and line before them."""


class CelLimits(msgspec.Struct, frozen=True, kw_only=True):
    """None: no limit of its own."""

    size_max: int
    size_of: Callable[[str], int]
    """How the size is counted: in characters or bytes."""
    bracket_depth_max: int
    loops_max: int | None
    loop_depth_max: int
    list_max: int | None
    """Items of the longest list in the values that an expression reads."""
    cost_max: int


WORKFLOW_LIMITS: Final = CelLimits(
    size_max=4096,
    size_of=len,
    bracket_depth_max=95,  # the parser's own limit; the SDK writes a pair of brackets for every operator
    loops_max=8,
    loop_depth_max=1,
    list_max=10_000,
    cost_max=2_000_000,  # at most half a second
)
CONDITION_LIMITS: Final = CelLimits(
    size_max=2048,
    size_of=lambda text: len(text.encode()),
    bracket_depth_max=24,
    loops_max=None,  # the cost is the sum over all loops
    loop_depth_max=2,
    list_max=None,  # a submission bounds the lists of its job
    cost_max=62_500,  # about 10 ms: a job is checked against many conditions
)


class CelMatches(msgspec.Struct, frozen=True):
    """`matches` of the CEL library, outside of loops only: it compiles the pattern for every call."""

    count_max: int


class LiteralMatches(msgspec.Struct, frozen=True):
    """`matches` with a literal pattern only. `compile_pattern` raises InvalidInput for a bad one; its result has
    `search`.
    """

    compile_pattern: Callable[[str], Any]


class CelDialect(msgspec.Struct, frozen=True, kw_only=True):
    """The CEL of one kind of expression."""

    limits: CelLimits
    texts: Mapping[Violation, str]
    variables: frozenset[str]
    functions: frozenset[str]
    macros: frozenset[str]
    matches: CelMatches | LiteralMatches
    hint: Callable[[str], str]
    """What to write instead of an unknown variable."""


class ExpressionError(Exception):
    """An expression could not be evaluated; the message is a sentence or, of a condition, a phrase."""


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


class Loop(msgspec.Struct, frozen=True):
    variable: str
    copies: bool
    """Whether it creates a list, which is copied for every item."""
    uses: int
    """How often its body uses the item."""
    length: int
    """Of the text evaluated for each item."""
    mentions: tuple[Path, ...]
    inner: tuple[Loop, ...]


class ExpressionShape(msgspec.Struct, frozen=True):
    """The parts of an expression's cost that do not depend on values."""

    mentions: tuple[Path, ...]
    loops: tuple[Loop, ...]
    literals: int
    pluses: int


class GuardedExpression:
    """A compiled expression whose evaluations are bounded."""

    __slots__ = ("_dialect", "_functions", "_program", "shape", "text")

    def __init__(
        self,
        text: str,
        shape: ExpressionShape,
        program: cel.Program,
        dialect: CelDialect,
        functions: dict[str, Callable[..., Any]],
    ) -> None:
        self.text = text
        self.shape = shape
        self._program = program
        self._dialect = dialect
        self._functions = functions

    def evaluate(self, scope: Mapping[str, Any], meter: CostMeter | None = None) -> Any:
        """The value for the variables in `scope`. Raises ExpressionError."""
        variables, found = _select_mentioned(scope, self.shape.mentions)
        cost = self.cost(found)
        if meter is not None:
            meter.spend(cost)
        try:
            return self._program.execute(self._context(variables))
        except Exception as error:  # noqa: BLE001 - the library raises many types; reported to the author of the expression
            raise self._error(
                Violation.NO_VALUE,
                kind=type(error).__name__,
                detail=str(error)[:200],
                reason=_error_reason(error),
            ) from None

    def cost(self, found: Mapping[Path, Any]) -> int:
        """Cost for the values of its mentions; raises ExpressionError beyond the limit."""
        limits = self._dialect.limits
        measured = {path: self._measure(value) for path, value in found.items()}
        longest = max((longest for _, longest in measured.values()), default=0)
        sizes = {path: size for path, (size, _) in measured.items()}
        cost = estimate_cost(self.shape, sizes, longest)
        if cost > limits.cost_max:
            raise self._error(Violation.COST)
        return cost

    def _measure(self, value: Any) -> tuple[int, int]:
        """Number of values including itself, where long texts count more; and the length of the longest list or map."""
        limits = self._dialect.limits
        size = longest = 0
        pending = [value]
        while pending and size <= limits.cost_max:
            each = pending.pop()
            size += 1
            match each:
                case str() | bytes():
                    size += len(each) // _TEXT_UNIT
                case list() | tuple():
                    if limits.list_max is not None and len(each) > limits.list_max:
                        raise self._error(Violation.LIST, count=len(each), limit=limits.list_max)
                    longest = max(longest, len(each))
                    pending += each
                case dict():
                    size += len(each)
                    longest = max(longest, len(each))
                    pending += each.values()
        return size, longest

    def _context(self, variables: dict[str, Any]) -> cel.Context | dict[str, Any]:
        if not self._functions:
            return variables
        import cel

        return cel.Context(variables=variables, functions=self._functions)

    def _error(self, violation: Violation, **facts: object) -> ExpressionError:
        return ExpressionError(self._dialect.texts[violation].format(quoted=quote_expression(self.text), **facts))


def compile_guarded(text: str, dialect: CelDialect, what: str = "") -> GuardedExpression:
    """Compile `text`, which belongs to `what`; raises InvalidInput if it is invalid or cannot be bounded."""
    return _Compiler(text, dialect, what).compile()


def check_size(text: str, dialect: CelDialect, what: str = "") -> None:
    """Raises InvalidInput if `text` is blank or too long."""
    _Compiler(text, dialect, what).check_size()


def blank_literals(text: str) -> str:
    """The text with every string literal replaced by a blank one of the same length."""
    return STRING_LITERAL.sub(lambda found: '"' + " " * (len(found[0]) - 2) + '"', text)


def quote_expression(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def estimate_cost(shape: ExpressionShape, sizes: Mapping[Path, int], longest: int) -> int:
    """Upper bound of the values read or copied, for mentions of these sizes; `longest` is the longest list in them."""
    length = max(longest, shape.literals)
    whole = sum(sizes[path] for path in shape.mentions) + shape.literals
    cost = CALL_COST + whole * (1 + shape.pluses)
    for loop in shape.loops:
        loop_cost, whole = _loop_cost(loop, sizes, length, whole)
        cost += loop_cost
    return cost


def _loop_cost(loop: Loop, sizes: Mapping[Path, int], length: int, whole: int) -> tuple[int, int]:
    """The cost of a loop over `length` items, and the size of all values after it; it was `whole` before."""
    each = loop.length // _BODY_UNIT + sum(sizes[path] for path in loop.mentions)
    for inner in loop.inner:
        inner_cost, whole = _loop_cost(inner, sizes, length, whole)
        each += inner_cost
    cost = length * each + whole
    if loop.copies:
        whole = whole * max(1, loop.uses) + length * each
        cost += length * whole // 2
    return cost, whole


class _Compiler:
    """The checks of one text. The order matters: each step relies on the ones before it."""

    def __init__(self, text: str, dialect: CelDialect, what: str) -> None:
        self._text = text
        self._dialect = dialect
        self._what = what

    @cached_property
    def _bare(self) -> str:
        """Not before the size was checked."""
        return blank_literals(self._text)

    def compile(self) -> GuardedExpression:
        self.check_size()
        if "//" in self._bare:
            raise self._refuse(Violation.COMMENT)
        self._check_brackets()
        self._check_macros()
        loops = tuple(self._loops(0, len(self._bare), 1))
        self._check_loop_count(loops)
        source, functions = self._checked_matches()
        program = self._program(source)
        self._check_names(program, loops)
        shape = ExpressionShape(
            mentions=tuple(self._mentions(0, len(self._bare))),
            loops=loops,
            literals=self._bare.count(",") + 1,
            pluses=self._bare.count("+"),
        )
        return GuardedExpression(self._text, shape, program, self._dialect, functions)

    def check_size(self) -> None:
        limits = self._dialect.limits
        size = limits.size_of(self._text)
        if not self._text.strip():
            raise self._refuse(Violation.BLANK, count=size, limit=limits.size_max)
        if size > limits.size_max:
            raise self._refuse(Violation.SIZE, count=size, limit=limits.size_max)

    def _check_brackets(self) -> None:
        limit = self._dialect.limits.bracket_depth_max
        # Counted by kind: a bracket that closes one of another kind, which the parser refuses later, hides no depth.
        depth = dict.fromkeys(")]}", 0)
        closing = {"(": ")", "[": "]", "{": "}"}
        for char in self._bare:
            if char in closing:
                depth[closing[char]] += 1
                if sum(depth.values()) > limit:
                    raise self._refuse(Violation.BRACKETS, limit=limit)
            elif char in depth:
                depth[char] = max(0, depth[char] - 1)

    def _check_macros(self) -> None:
        for found in _MACRO_CALL.finditer(self._bare):
            if found[1] not in self._dialect.macros:
                raise self._refuse(Violation.MACRO, name=found[1])

    def _loops(self, begin: int, end: int, depth: int) -> Iterator[Loop]:
        """The outermost loops between two positions, with those in their bodies. Brackets bound the depth."""
        limit = self._dialect.limits.loop_depth_max
        while (found := _LOOP.search(self._bare, begin, end)) is not None:
            if depth > limit:
                raise self._refuse(Violation.LOOP_DEPTH, limit=limit)
            at, begin = found.start(2), _closing_bracket(self._bare, found.start(2), end)
            body = self._bare[at:begin]
            inner = tuple(self._loops(at, begin, depth + 1))
            if "matches" in body and isinstance(self._dialect.matches, CelMatches):
                raise self._refuse(Violation.MATCHES_IN_LOOP)
            counts_items = found[1] == "map" and bool(found[2])
            yield Loop(
                variable=found[2],
                copies=found[1] in _COPYING_MACROS,
                uses=len(re.findall(rf"\b{found[2]}\b", body)) - 1 if counts_items else 1,
                length=len(body),
                mentions=tuple(self._mentions(at, begin)),
                inner=inner,
            )

    def _check_loop_count(self, loops: Sequence[Loop]) -> None:
        limit = self._dialect.limits.loops_max
        count = sum(1 for _ in _flatten(loops))
        if limit is not None and count > limit:
            raise self._refuse(Violation.LOOPS, count=count, limit=limit)

    def _mentions(self, begin: int, end: int) -> Iterator[Path]:
        """Paths that are named between two positions, outside of string literals."""
        pattern = _mention_pattern(self._dialect.variables)
        while (found := pattern.search(self._text, begin, end)) is not None:
            if self._bare[found.start()] == self._text[found.start()]:
                begin = found.end()
                yield tuple(_part(part) for part in _PART.findall(found[0]))
            else:  # in a literal; the match may reach beyond it, as in 'input[' + steps.a.output + ']'
                begin = found.start() + 1

    def _checked_matches(self) -> tuple[str, dict[str, Callable[..., Any]]]:
        """The text to compile, and the functions that its evaluation needs."""
        match self._dialect.matches:
            case CelMatches(count_max):
                if (count := self._bare.count("matches")) > count_max:
                    raise self._refuse(Violation.MATCHES_COUNT, count=count, limit=count_max)
                return self._text, {}
            case LiteralMatches(compile_pattern):
                return self._use_literal_patterns(compile_pattern)
            case other:
                assert_never(other)

    def _use_literal_patterns(self, compile_pattern: Callable[[str], Any]) -> tuple[str, dict[str, Callable[..., Any]]]:
        if _LITERAL_MATCHES in self._bare:
            raise self._refuse(Violation.FUNCTION, name=_LITERAL_MATCHES)
        source, copied = [], 0
        for found in _MATCHES_CALL.finditer(self._bare):
            if not found["literal"] or not found["end"]:
                raise self._refuse(Violation.PATTERN_NOT_LITERAL)
            compile_pattern(self._literal(self._text[found.start("literal") : found.end("literal")]))
            source += [self._text[copied : found.start()], _LITERAL_MATCHES]
            copied = found.start() + len("matches")

        def search(text: str, pattern: str) -> bool:
            return compile_pattern(pattern).search(text) is not None

        return "".join([*source, self._text[copied:]]), {_LITERAL_MATCHES: search} if source else {}

    def _literal(self, literal: str) -> str:
        import cel

        try:
            value = cel.evaluate(literal)
        except Exception:  # noqa: BLE001 - the library has no error of its own
            raise self._refuse(Violation.INVALID_LITERAL, literal=literal[:60]) from None
        if not isinstance(value, str):
            raise self._refuse(Violation.PATTERN_NOT_LITERAL)
        return value

    def _program(self, source: str) -> cel.Program:
        import cel

        try:
            return cel.compile(source)
        except Exception as error:  # noqa: BLE001 - the library raises several kinds
            raise self._refuse(Violation.INVALID, why=_parse_error(error)) from None

    def _check_names(self, program: cel.Program, loops: Sequence[Loop]) -> None:
        dialect = self._dialect
        variables = dialect.variables | {loop.variable for loop in _flatten(loops)}
        for name in sorted(program.variables()):
            if name not in variables:
                raise self._refuse(Violation.VARIABLE, name=name[:60], hint=dialect.hint(name))
        functions = OPERATORS | dialect.functions | {_LITERAL_MATCHES}
        for name in sorted(program.functions()):
            if name not in functions:
                raise self._refuse(Violation.FUNCTION, name=name[:60])

    def _refuse(self, violation: Violation, **facts: object) -> InvalidInput:
        quoted = quote_expression(self._text)
        return InvalidInput(self._dialect.texts[violation].format(quoted=quoted, what=self._what, **facts))


def _flatten(loops: Sequence[Loop]) -> Iterator[Loop]:
    for loop in loops:
        yield loop
        yield from _flatten(loop.inner)


def _closing_bracket(bare: str, at: int, end: int) -> int:
    """Index of the bracket that closes the one before `at`."""
    depth = 1
    for place in range(at, end):
        depth += {"(": 1, ")": -1}.get(bare[place], 0)
        if depth == 0:
            return place
    return end


@lru_cache
def _mention_pattern(variables: frozenset[str]) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w.])(?:{'|'.join(sorted(variables))})\b{_PATH}", re.ASCII)


def _part(part: str) -> str | int:
    if part[0] in "\"'":
        return part[1:-1]
    return int(part) if part.isdigit() else part


def _parse_error(error: Exception) -> str:
    """Shorten the parser's report, which quotes the whole expression, to its first error."""
    found = re.search(r"ERROR: <input>:\d+:(\d+): ([^\n|]+)", str(error))
    return f"{found[2].strip()[:200]} at column {found[1]}" if found else "it cannot be parsed"


def _error_reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"there is no {str(error)[:60]}: test with has() or `in` first"
    return " ".join(str(error).split(":", 1)[0].split())[:100] or type(error).__name__


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
