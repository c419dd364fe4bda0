"""The examples as a person types them: every command of their page, and what it prints but for ids and times."""

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests.ground.commands import Terminal, rows
from tests.ground.farm import Farm

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "examples/README.md").read_text()
NAMES = [path.name for path in sorted((ROOT / "examples").iterdir()) if path.is_dir() and path.name != "__pycache__"]
TIME = re.compile(r"\b[\d.]+ m?s\b")


def typed_in(name):
    """Commands of the section of an example, each with the lines it prints."""
    [section] = [part for part in PAGE.split("\n## ") if f"({name}/" in part]
    block = section.partition("```console\n")[2].partition("```")[0]
    return [(said[0], said[1:]) for said in (part.splitlines() for part in block.split("$ rota ")[1:])]


@pytest.fixture
async def farm(database_url, redis_url, nats_url, bus_prefix, tmp_path, monkeypatch):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "tasks", raising=False)
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as farm:
        await farm.show("default")
        yield farm


@pytest.fixture
def typed(monkeypatch, capsys, database_url):
    monkeypatch.setenv("ROTA_POSTGRES_URL", database_url)
    return Terminal(monkeypatch, capsys)


def plain(lines):
    return [" ".join(TIME.sub("TIME", line).split()) for line in lines]


@pytest.mark.parametrize("name", NAMES)
async def test_an_example_prints_what_its_page_says(farm, typed, name):
    (up, _), *commands, (down, _) = typed_in(name)
    assert (up.split()[:2], down) == (["up", "--detach"], "down")
    await farm.worker(of=up.partition("--app ")[2], slots=4)
    for line, printed in commands:
        said = await typed([os.path.expandvars(word) for word in shlex.split(line)])
        assert plain(rows(said.out)) == plain(printed), (line, said.err)
        assert said.status == int("FAILED after" in said.out or "TIMEOUT after" in said.out)


def test_every_example_is_on_the_page():
    assert NAMES == ["agents", "pipeline", "render", "sweep"]
    assert all(f"({name}/" in PAGE for name in NAMES)


async def test_a_submission_from_a_file_says_everything(farm, typed, tmp_path):
    cases = {
        "missing.yaml": (None, "cannot be read"),
        "broken.yaml": ("a: [", "neither YAML nor JSON"),
        "list.yaml": ("- a", "is no submission"),
        "unknown.yaml": ("layres: []", "no submission: Object"),
        "odd.yaml": (f"layers: [{{task: a, input: {2**70}}}]", "holds what cannot be submitted"),
        "empty.json": ('{"layers": []}', "at least one layer"),
    }
    for name, (text, word) in cases.items():
        if text is not None:
            (tmp_path / name).write_text(text)
        said = await typed(f"submit --file {name}")
        assert (said.status, word in said.err) == (2, True), (name, said.err)
    said = await typed("submit --file examples/sweep/job.yaml --show other")
    assert (said.status, "says everything" in said.err) == (2, True)
