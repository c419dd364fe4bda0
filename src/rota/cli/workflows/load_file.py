"""Definitions of workflows by what a person types: `trip.yaml`, `trip.py`, or `trip.py:trip` of an app with several."""

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
    """Whether it names a file, and not a workflow that was declared."""
    return Path(what).suffix in SUFFIXES or bool(_split_python_ref(what)[0])


def read_definitions(what: str) -> list[WorkflowSpec]:
    """What is to be declared: the workflow that is meant comes last, after those that it runs."""
    file, name = _split_python_ref(what)
    if not file:
        return [yaml_loader.read(Path(what))]
    flows = load_app.load(file, Path.cwd()).flows
    if not name and len(flows) == 1:
        [name] = flows
    if name not in flows:
        there = ", ".join(f"{file}:{each}" for each in flows)
        raise InvalidInput(f"{what} names no workflow: write {there}." if flows else f"{file} declares no workflow.")
    return list({each.name: each.spec for each in _with_dependencies(flows[name])}.values())


def _split_python_ref(what: str) -> tuple[str, str]:
    """A file and the name of a workflow in it, or nothing."""
    file, _, name = what.rpartition(":")
    return (what, "") if what.endswith(".py") else (file, name) if file.endswith(".py") else ("", "")


def _with_dependencies(workflow: Workflow[..., Any]) -> list[Workflow[..., Any]]:
    return [*(below for used in workflow.uses for below in _with_dependencies(used)), workflow]
