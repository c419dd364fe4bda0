"""Checks of how objects are put together: the number of constructor parameters, callbacks assigned later. Read-only.

Objects are complete when constructed: collaborators are constructor arguments, and a class that needs more than seven
has two jobs.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.gates.names import source_files
from tests.gates.tree import Report

PARAMETERS_MAX = 7
"""Besides `self`. Fields of structs and dataclasses are data and are not counted."""

_BEING_SPLIT = "being split by responsibility"
LARGE_CONSTRUCTORS = {
    ("src/rota/runtime.py", "Replica"): "puts a whole process together; being split",
    ("src/rota/engine/engine.py", "Engine"): "puts all stages together; being split",
    ("src/rota/engine/dispatch/assigner.py", "Assigner"): _BEING_SPLIT,
    ("src/rota/engine/dispatch/dispatcher.py", "Dispatcher"): _BEING_SPLIT,
    ("src/rota/engine/recovery/reconciler.py", "EngineReconciler"): _BEING_SPLIT,
}
"""Classes that may have more parameters for now, with the reason."""

_BECOMES_ARGUMENTS = "its callbacks are being turned into constructor arguments"
LATE_CALLBACKS = {
    "src/rota/engine/": _BECOMES_ARGUMENTS,
    "src/rota/placement/": _BECOMES_ARGUMENTS,
    "src/rota/workflow/": _BECOMES_ARGUMENTS,
    "src/rota/runtime.py": _BECOMES_ARGUMENTS,
}
"""Paths that may assign callbacks of other objects for now, with the reason."""


def constructors(root: Path) -> Report:
    """No constructor has more than `PARAMETERS_MAX` parameters."""
    problems, count = [], 0
    needless = dict(LARGE_CONSTRUCTORS)
    for name, text in source_files(root, ".py"):
        for owner, constructor in _constructors(ast.parse(text)):
            count += 1
            parameters = _parameter_count(constructor)
            if parameters > PARAMETERS_MAX and not needless.pop((name, owner), ""):
                problems.append(
                    f"{name}:{constructor.lineno}: {owner} has {parameters} constructor parameters, at most"
                    f" {PARAMETERS_MAX}: it has two jobs"
                )
    kept = len(LARGE_CONSTRUCTORS) - len(needless)
    return Report(problems, f"{count} constructors, {kept} of {len(LARGE_CONSTRUCTORS)} exceptions needed")


def callbacks(root: Path) -> Report:
    """No code assigns an attribute `on_*` of another object."""
    problems, excepted = [], 0
    for name, text in source_files(root, ".py"):
        found = [
            f"{name}:{line}: {target} is assigned after construction: pass it to the constructor, or subscribe"
            for line, target in _assigned_callbacks(ast.parse(text))
        ]
        if name.startswith(tuple(LATE_CALLBACKS)):
            excepted += len(found)
        else:
            problems += found
    return Report(problems, f"{excepted} in excepted paths")


def _constructors(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every constructor with the name of its class."""
    for owner in ast.walk(tree):
        if isinstance(owner, ast.ClassDef):
            for node in owner.body:
                if isinstance(node, ast.FunctionDef) and node.name in ("__init__", "__new__"):
                    yield owner.name, node


def _parameter_count(constructor: ast.FunctionDef) -> int:
    given = constructor.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    return len(named) - 1 + (given.vararg is not None) + (given.kwarg is not None)


def _assigned_callbacks(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Attributes `on_*` of objects other than `self` that are assigned, each with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self")):
                continue
            case ast.Attribute(attr=attribute, ctx=ast.Store()) if attribute.startswith("on_"):
                yield node.lineno, ast.unparse(node)
            case ast.Call(func=ast.Name(id="setattr"), args=[target, ast.Constant(value=str(attribute)), *_]) if (
                attribute.startswith("on_") and ast.unparse(target) != "self"
            ):
                yield node.lineno, f"{ast.unparse(target)}.{attribute}"
