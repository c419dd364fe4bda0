"""Finds every time above one second that is written into the code, for docs/reference/time-constants.md.

    python -m tools.docs.time_constants

prints them, one per line. Found are numbers and timedeltas of modules and classes, defaults of parameters, arguments of
calls, and literals in SQL, whenever their name ends in a unit of time (`_s`, `_ms`, `timeout` and the like). Not found
are settings, which have their own page, and names of constants that are listed already.
"""

from __future__ import annotations

import ast
import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).parents[2] / "src" / "rota"
SETTINGS: Final = SOURCE / "model" / "settings"
SHORTEST_S: Final = 1.0
UNITS_S: Final = {"weeks": 604800.0, "days": 86400.0, "hours": 3600.0, "minutes": 60.0, "seconds": 1.0}
UNITS_S |= {"milliseconds": 1e-3, "microseconds": 1e-6}
_NAMES_S: Final = (("_ms", 1e-3), ("_millis", 1e-3), ("_s", 1.0), ("_seconds", 1.0), ("timeout", 1.0), ("ttl", 1.0))
_SQL: Final = re.compile(r"(?i:interval|timeout =|timeout to) '(\d+) ?(ms|s|seconds?|minutes?|hours?|days?|weeks?)'")
_OPERATORS: Final[Mapping[type[ast.operator], Callable[[float, float], float]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def constants() -> dict[str, float]:
    """Seconds by the place where they are written, such as `agents.membership.LEASE_S`."""
    found: dict[str, float] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        if SETTINGS not in path.parents:
            found.update(_Module(path).long_times())
    for path in sorted(SOURCE.rglob("*.sql")):
        for number, unit in _SQL.findall(path.read_text()):
            if (seconds := float(number) * _sql_unit_s(unit)) > SHORTEST_S:
                found[f"{path.relative_to(SOURCE)}: {number} {unit}"] = seconds
    return found


def _sql_unit_s(unit: str) -> float:
    return {"ms": 1e-3, "s": 1.0}.get(unit) or UNITS_S[unit.rstrip("s") + "s"]


class _Module:
    def __init__(self, path: Path) -> None:
        self._prefix = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        self._tree = ast.parse(path.read_text())
        self._numbers: dict[str, float] = {}

    def long_times(self) -> Iterator[tuple[str, float]]:
        for name, node in self._named(self._tree, ""):
            value = self._value(node)
            if value is None:
                continue
            last = name.rpartition(".")[2].partition("(")[0]
            if isinstance(node, ast.Constant | ast.BinOp):
                self._numbers.setdefault(last, value)
            seconds = value * _unit_s(name, node)
            if seconds > SHORTEST_S and not isinstance(node, ast.Name):
                yield f"{self._prefix}.{name}", seconds

    def _named(self, node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.expr]]:
        """Every expression that has a name: assigned, a default, or a keyword argument of a call."""
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                    for name, value in zip(names, values, strict=False):
                        yield prefix + ast.unparse(name), value
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=value)
                    | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
                ):
                    yield prefix + name, value
                    yield from self._named(child, f"{prefix}{name}.")
                    continue
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    yield from _defaults(child, prefix)
                    yield from self._named(child, f"{prefix}{child.name}().")
                    continue
                case ast.ClassDef(name=name):
                    yield from self._named(child, f"{prefix}{name}.")
                    continue
                case ast.keyword(arg=str() as name, value=value):
                    yield prefix + name, value
            yield from self._named(child, prefix)

    def _value(self, node: ast.expr) -> float | None:
        match node:
            case ast.Constant(value=bool()):
                return None
            case ast.Constant(value=int() | float() as number):
                return float(number)
            case ast.Name(id=name):
                return self._numbers.get(name)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                a, b = self._value(left), self._value(right)
                return None if a is None or b is None else _OPERATORS[type(op)](a, b)
            case ast.Call(func=ast.Name(id="timedelta"), keywords=parts):
                values = [self._value(part.value) for part in parts]
                pairs = zip(parts, values, strict=True)
                return sum(value * UNITS_S[str(part.arg)] for part, value in pairs if value is not None)
        return None


def _defaults(function: ast.FunctionDef | ast.AsyncFunctionDef, prefix: str) -> Iterator[tuple[str, ast.expr]]:
    of = function.args
    ordered = [*of.posonlyargs, *of.args]
    with_default = [
        *zip(ordered[len(ordered) - len(of.defaults) :], of.defaults, strict=True),
        *zip(of.kwonlyargs, of.kw_defaults, strict=True),
    ]
    for parameter, default in with_default:
        if default is not None:
            yield f"{prefix}{function.name}({parameter.arg})", default


def _unit_s(name: str, node: ast.expr) -> float:
    if isinstance(node, ast.Call):
        return 1.0
    last = name.rstrip(")").replace("(", ".").rpartition(".")[2].lower()
    return next((unit for suffix, unit in _NAMES_S if last.endswith(suffix)), 0.0)


if __name__ == "__main__":
    for name, seconds in constants().items():
        sys.stdout.write(f"{seconds:g}\t{name}\n")
