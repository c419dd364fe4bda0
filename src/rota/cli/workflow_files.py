"""Definitions of workflows by what a person types: `trip.yaml`, `trip.py`, or `trip.py:trip` of an app with several."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from rota.model.errors import InvalidInput
from rota.model.workflow import WorkflowSpec
from rota.sdk import loading
from rota.sdk.workflow import Workflow
from rota.workflow import reading

SUFFIXES: Final = (".yaml", ".yml", ".json")


def is_file(what: str) -> bool:
    """Whether it names a file, and not a workflow that was declared."""
    return Path(what).suffix in SUFFIXES or bool(_python(what)[0])


def read(what: str) -> list[WorkflowSpec]:
    """What is to be declared: the workflow that is meant comes last, after those that it runs."""
    file, name = _python(what)
    if not file:
        return [reading.read(Path(what))]
    flows = loading.load(file, Path.cwd()).flows
    if not name and len(flows) == 1:
        [name] = flows
    if name not in flows:
        there = ", ".join(f"{file}:{each}" for each in flows)
        raise InvalidInput(f"{what} names no workflow: write {there}." if flows else f"{file} declares no workflow.")
    return list({each.name: each.spec for each in _with_used(flows[name])}.values())


def _python(what: str) -> tuple[str, str]:
    """A file and the name of a workflow in it, or nothing."""
    file, _, name = what.rpartition(":")
    return (what, "") if what.endswith(".py") else (file, name) if file.endswith(".py") else ("", "")


def _with_used(workflow: Workflow[..., Any]) -> list[Workflow[..., Any]]:
    return [*(below for used in workflow.uses for below in _with_used(used)), workflow]
