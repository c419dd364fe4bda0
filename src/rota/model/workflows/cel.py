"""The CEL of workflows: the names that `${...}` may use, guarded by `rota.model.cel_guard`. No I/O.

All expressions of one advance share one `CostMeter`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

from rota.model.cel_guard import (
    LOOP_MACROS,
    SENTENCES,
    WORKFLOW_LIMITS,
    CelDialect,
    CelMatches,
    compile_guarded,
    quote_expression,
)
from rota.model.errors import InvalidInput

METER_KEY: Final = ""
"""Key under which a scope holds the `CostMeter` shared by its expressions."""
ROOTS: Final = frozenset({"input", "steps", "run", "round", "item"})
"""Names an expression may use."""
MATCHES_MAX: Final = 8

WORKFLOW_DIALECT: Final = CelDialect(
    limits=WORKFLOW_LIMITS,
    texts=SENTENCES,
    variables=ROOTS,
    functions=frozenset(
        {"size", "contains", "startsWith", "endsWith", "matches", "dyn"}
        | {"int", "uint", "double", "string", "bytes", "bool", "type", "duration", "timestamp"}
        | {"getFullYear", "getMonth", "getDate", "getDayOfMonth", "getDayOfWeek", "getDayOfYear"}
        | {"getHours", "getMinutes", "getSeconds", "getMilliseconds"}
    ),
    macros=LOOP_MACROS,
    matches=CelMatches(MATCHES_MAX),
    hint=lambda _name: f": use one of {', '.join(sorted(ROOTS))}",
)


@lru_cache(maxsize=4096)
def evaluator(text: str, what: str) -> Callable[[Mapping[str, Any]], Any]:
    """Compile `text`; raises InvalidInput if it is invalid or cannot be bounded."""
    expression = compile_guarded(text, WORKFLOW_DIALECT, what)
    if ("steps",) in expression.shape.mentions:
        raise InvalidInput(f"The expression {quote_expression(text)} of {what} reads all steps: name the one it needs.")
    return lambda scope: expression.evaluate(scope, scope.get(METER_KEY))
