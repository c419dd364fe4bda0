"""Loads workflow definitions by what a person types: `trip.yaml`, `trip.py`, or `trip.py:trip` for one of several."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from rota.model.errors import InvalidInput
from rota.model.workflows.spec import WorkflowSpec
from rota.sdk import load_app
from rota.sdk.workflow.workflow import Workflow
from rota.workflow import yaml_loader

SUFFIXES: Final = (".yaml", ".yml", ".json")


def is_definition_file(what: str) -> bool:
    """Whether `what` names a file rather than a declared workflow."""
    return Path(what).suffix in SUFFIXES or bool(_split_python_ref(what)[0])


def read_definitions(what: str) -> list[WorkflowSpec]:
    """The definitions to declare: the named workflow last, after the workflows it runs."""
    file, name = _split_python_ref(what)
    if not file:
        return [yaml_loader.read(Path(what))]
    flows = load_app.load(file, Path.cwd()).flows
    if not name and len(flows) == 1:
        [name] = flows
    if name not in flows:
        names = ", ".join(f"{file}:{each}" for each in flows)
        raise InvalidInput(
            f"{what} does not name a workflow: use {names}."
            if flows
            else f"{file} declares no workflow: declare one in it."
        )
    return list({each.name: each.spec for each in _with_dependencies(flows[name])}.values())


def _split_python_ref(what: str) -> tuple[str, str]:
    """A Python file and the name of a workflow in it; both empty for anything else."""
    file, _, name = what.rpartition(":")
    return (what, "") if what.endswith(".py") else (file, name) if file.endswith(".py") else ("", "")


def _with_dependencies(workflow: Workflow[..., Any]) -> list[Workflow[..., Any]]:
    return [*(each for dependency in workflow.uses for each in _with_dependencies(dependency)), workflow]
