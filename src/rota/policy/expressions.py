"""`when:` a CEL condition over the fields of `rota.model.policy.decision.PolicyRequest`.

    when: frames > 100 && !("reviewed" in labels)

`rota.model.cel_guard` bounds its cost; `map` is not supported, so no value can grow, and `matches` takes a string
literal, which RE2 checks when the file is read and matches later.

An error (a missing label, a number compared with a string, a result that is not boolean) is an `ExpressionError`, and
`rota.policy.evaluate` denies then. A program is compiled once per file.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import msgspec

from rota.infra.yaml_reader import suggestion
from rota.model.cel_guard import (
    CONDITION_LIMITS,
    PHRASES,
    CelDialect,
    ExpressionError,
    LiteralMatches,
    compile_guarded,
)
from rota.model.policy.decision import PolicyRequest
from rota.policy.regex import compile_re2

FIELDS: Final = tuple(field.name for field in msgspec.structs.fields(PolicyRequest))

CONDITION_DIALECT: Final = CelDialect(
    limits=CONDITION_LIMITS,
    texts=PHRASES,
    variables=frozenset(FIELDS),
    functions=frozenset({"size", "contains", "startsWith", "endsWith", "int", "double", "string"}),
    macros=frozenset({"all", "exists", "exists_one", "filter"}),
    matches=LiteralMatches(compile_re2),
    hint=partial(suggestion, known=FIELDS),
)


class Condition:
    """One compiled expression."""

    def __init__(self, text: str) -> None:
        """Raises InvalidInput with a phrase for an invalid condition."""
        self.text = text
        self._expression = compile_guarded(text, CONDITION_DIALECT)

    def holds(self, context: ConditionContext) -> bool:
        """Raises ExpressionError if it cannot be evaluated."""
        result = self._expression.evaluate(context.variables)
        if not isinstance(result, bool):
            raise ExpressionError("its result is not a boolean")
        return result


class ConditionContext:
    """The CEL variables of one job, built on first use."""

    def __init__(self, request: PolicyRequest) -> None:
        self._request = request
        self._variables: dict[str, Any] = {}

    @property
    def variables(self) -> dict[str, Any]:
        if not self._variables:
            self._variables = {name: _to_cel(getattr(self._request, name)) for name in FIELDS}
        return self._variables


def _to_cel(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
