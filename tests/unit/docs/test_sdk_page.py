"""docs/reference/sdk.md: its code runs, and it covers everything user code can call."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import rota
from rota import testing
from rota.client.admin_client import AdminClient
from rota.sdk.task import Task
from rota.sdk.task_options import TaskOptions
from rota.sdk.workflow.run import RunHandle
from rota.sdk.workflow.workflow import WorkflowOptions

PAGE = (Path(__file__).resolve().parents[3] / "docs/reference/sdk.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
INTERNAL = {
    "submission",
    "submissions",
    "jobs",
    "mapping",
    "mapped",
    "framed",
    "name",
    "send",
    "owned",
    "change",
    "specs",
}
"""Public for the sync facade; not for user code."""


async def test_sdk_page_code_runs():
    names = {"__name__": "page"}
    with testing.inline():
        for block in BLOCKS:
            code = compile(block, "sdk.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            if inspect.iscoroutine(ended := eval(code, names)):
                await ended
    assert len(BLOCKS) >= 4


def public(kind):
    return {name for name in vars(kind) if not name.startswith("_")}


@pytest.mark.parametrize(
    "name",
    sorted(
        {*rota.__all__, *testing.__all__, *TaskOptions.__annotations__, *WorkflowOptions.__annotations__}
        | ((public(Task) | public(rota.Workflow) | public(rota.Steps) | public(rota.Step)) - INTERNAL)
        | public(RunHandle)
        | (public(rota.Job) | public(testing.Rehearsal) | public(testing.MovableClock))
        - {"find", "add", "cancel", "transport", "now_ms", "monotonic", "sleep", "play", "known", "submitted_more"}
    ),
)
def test_sdk_page_mentions_every_public_name(name):
    assert re.search(rf"\b{name}\b", PAGE), f"{name} is not on the page"


@pytest.mark.parametrize("name", sorted(public(AdminClient)))
def test_sdk_page_lists_exactly_the_calls_of_each_admin_client(name):
    [row] = [line for line in PAGE.splitlines() if line.startswith("|") and f"`app.{name}`" in line]
    parts = [getattr(rota.Rota(), part) for part in re.findall(r"`app\.(\w+)`", row)]
    assert set(re.findall(r"`(\w+)\(", row)) == {call for part in parts for call in public(type(part))}
