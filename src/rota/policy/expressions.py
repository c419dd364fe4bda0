"""`when:` a CEL condition over the fields of `rota.model.policy.decision.PolicyRequest`.

    when: frames > 100 && !("reviewed" in labels)

The cost of an expression is bounded when the file is read, so no evaluation needs a timeout:

- At most 2,048 bytes, brackets nested 24 deep, and the functions listed here; `map` is not among them, so no value can
  grow.
- `all`, `exists`, `exists_one` and `filter` nest at most two deep. Before evaluation their cost for this job is
  estimated; beyond `STEPS_MAX` it is an error, always for the same job.
- `matches` takes a string literal, which RE2 checks when the file is read and matches later.

An error (a missing label, a number compared with a string, a result that is not boolean) is a `ConditionError`, and
`rota.policy.evaluate` denies then. A program is compiled once per file.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import msgspec

from rota.infra.yaml_reader import suggestion
from rota.model.errors import InvalidInput
from rota.model.policy.decision import PolicyRequest
from rota.policy.regex import compile_re2

if TYPE_CHECKING:
    import cel

BYTES_MAX: Final = 2048
DEPTH_MAX: Final = 24
MACRO_DEPTH_MAX: Final = 2
STEPS_MAX: Final = 500_000
"""About 0.1 s."""

FIELDS: Final = tuple(field.name for field in msgspec.structs.fields(PolicyRequest))
_LISTS: Final = ("risk_tags", "requires", "labels", "tasks", "env_names")
_MATCHES: Final = "matches_re2"
_FUNCTIONS: Final = frozenset(
    {"size", "contains", "startsWith", "endsWith", _MATCHES, "int", "double", "string", "@not_strictly_false", "@in"}
    | {"_&&_", "_||_", "!_", "_==_", "_!=_", "_<_", "_<=_", "_>_", "_>=_", "_[_]", "_?_:_"}
    | {"_+_", "_-_", "_*_", "_/_", "_%_", "-_"}
)
_STRING: Final = re.compile(
    r"""(?P<raw>[rR])?(?:"{3}.*?"{3}|'{3}.*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')""", re.DOTALL
)
_BOUND: Final = re.compile(r"\.\s*(?:all|exists|exists_one|filter)\s*\(\s*(\w+)\s*,")
_MACRO: Final = re.compile(r"\.\s*(?:all|exists|exists_one|filter)\s*$")
_CALL_OF_MATCHES: Final = re.compile(r"\bmatches\s*\(\s*(?P<literal>§[0-9]+§)?\s*(?P<end>\))?")


class ConditionError(Exception):
    """A condition that could not be evaluated to a boolean; the message is a phrase."""


class Condition:
    """One compiled expression."""

    def __init__(self, text: str) -> None:
        """Raises InvalidInput with a phrase for an invalid condition."""
        self.text = text
        bare, literals = _extract_strings(text)
        self._depth = _check_shape(text, bare)
        self._literal_longest = bare.count(",") + 1
        self._program = _program(_restore_strings(_use_re2(bare, literals), literals))
        _check_names(self._program, bare)

    def holds(self, context: ConditionContext) -> bool:
        """Raises ConditionError if it cannot be evaluated."""
        if self._depth and max(context.longest, self._literal_longest) ** self._depth * len(self.text) > STEPS_MAX:
            raise ConditionError("it is too expensive for lists of this length")
        try:
            result = self._program.execute(context.context)
        except Exception as error:  # noqa: BLE001 - every error means: not evaluated
            raise ConditionError(_error_reason(error)) from None
        if not isinstance(result, bool):
            raise ConditionError("its result is not a boolean")
        return result


class ConditionContext:
    """The CEL variables of one job, built on first use."""

    def __init__(self, request: PolicyRequest) -> None:
        self._request = request
        self._context: cel.Context | None = None
        self.longest = max(len(getattr(request, name)) for name in _LISTS)

    @property
    def context(self) -> cel.Context:
        if self._context is None:
            import cel

            variables = {name: _to_cel(getattr(self._request, name)) for name in FIELDS}
            self._context = cel.Context(variables=variables, functions={_MATCHES: _search_re2})
        return self._context


def _to_cel(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _extract_strings(text: str) -> tuple[str, list[str]]:
    """The expression with `§n§` for each string literal, and the literals."""
    literals: list[str] = []

    def extract(found: re.Match[str]) -> str:
        literals.append(found[0])
        return f"§{len(literals) - 1}§"

    if "§" in text:
        raise InvalidInput("an expression must not contain §")
    return _STRING.sub(extract, text), literals


def _restore_strings(bare: str, literals: list[str]) -> str:
    return re.sub(r"§([0-9]+)§", lambda found: literals[int(found[1])], bare)


def _check_shape(text: str, bare: str) -> int:
    """The nesting depth of its macros; InvalidInput if it is too long, too deep or uses a forbidden construct."""
    if len(text.encode()) > BYTES_MAX:
        raise InvalidInput(f"an expression can have at most {BYTES_MAX} bytes")
    if "//" in bare:
        raise InvalidInput("an expression cannot have comments: write them as YAML comments")
    if re.search(r"\bmap\s*\(", bare):
        raise InvalidInput("`map` is not supported: use all, exists, exists_one or filter")
    macro_stack: list[bool] = []
    max_depth = 0
    for at, char in enumerate(bare):
        if char in "([{":
            macro_stack.append(char == "(" and bool(_MACRO.search(bare[max(0, at - 40) : at])))
            max_depth = max(max_depth, sum(macro_stack))
        elif char in ")]}" and macro_stack:
            macro_stack.pop()
        if len(macro_stack) > DEPTH_MAX:
            raise InvalidInput(f"the brackets of an expression can nest at most {DEPTH_MAX} deep")
    if max_depth > MACRO_DEPTH_MAX:
        raise InvalidInput(f"all, exists, exists_one and filter can nest at most {MACRO_DEPTH_MAX} deep")
    return max_depth


def _use_re2(bare: str, literals: list[str]) -> str:
    def rewrite(found: re.Match[str]) -> str:
        if not found["literal"] or not found["end"]:
            raise InvalidInput("matches takes one string literal, such as topic.matches('^job')")
        compile_re2(_literal(literals[int(found["literal"].strip("§"))]))
        return f"{_MATCHES}({found['literal']})"

    return _CALL_OF_MATCHES.sub(rewrite, bare)


def _literal(text: str) -> str:
    import cel

    try:
        return str(cel.evaluate(text))
    except Exception:  # noqa: BLE001 - the library has no error of its own
        raise InvalidInput(f"{text[:60]} is not a valid string literal") from None


def _program(text: str) -> cel.Program:
    import cel

    try:
        return cel.compile(text)
    except Exception as error:  # noqa: BLE001 - the library raises several kinds
        raise InvalidInput(f"this is not valid CEL: {_parse_error(error)}") from None


def _parse_error(error: Exception) -> str:
    """Shorten the parser's report, which quotes the whole expression, to its first error."""
    found = re.search(r"ERROR: <input>:\d+:(\d+): ([^\n|]+)", str(error))
    return f"{found[2].strip()} at column {found[1]}" if found else "it cannot be parsed"


def _check_names(program: cel.Program, bare: str) -> None:
    known = {*FIELDS, *_BOUND.findall(bare)}
    for name in program.variables():
        if name not in known:
            raise InvalidInput(f"{name[:60]!r} is not a field of a job{suggestion(name, FIELDS)}")
    for name in program.functions():
        if name not in _FUNCTIONS:
            raise InvalidInput(f"the function {name[:60]!r} is not supported")


def _error_reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"there is no {str(error)[:60]}: test with has() or `in` first"
    return " ".join(str(error).split(":", 1)[0].split())[:100] or type(error).__name__


def _search_re2(text: str, pattern: str) -> bool:
    return compile_re2(pattern).search(text) is not None
