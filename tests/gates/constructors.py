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


def constructors(root: Path) -> Report:
    """No constructor has more than `PARAMETERS_MAX` parameters."""
    problems, count = [], 0
    for name, text in source_files(root, ".py"):
        for owner, constructor in _constructors(ast.parse(text)):
            count += 1
            parameters = _parameter_count(constructor)
            if parameters > PARAMETERS_MAX:
                problems.append(
                    f"{name}:{constructor.lineno}: {owner} has {parameters} constructor parameters, at most"
                    f" {PARAMETERS_MAX}: it has two jobs"
                )
    return Report(problems, f"{count} constructors")


def callbacks(root: Path) -> Report:
    """No code assigns an attribute `on_*` of another object."""
    return Report(
        [
            f"{name}:{line}: {target} is assigned after construction: pass it to the constructor, or subscribe"
            for name, text in source_files(root, ".py")
            for line, target in _assigned_callbacks(ast.parse(text))
        ]
    )


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
