"""The examples as a person types them: every command of their page, and what it prints but for ids and times."""

import os
import re
import shlex
import shutil
import socket
import sys
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from rota.model.access import Role
from rota.server import services
from tests.support.api import Api
from tests.support.commands import Terminal, rows
from tests.support.replica_and_worker import Farm
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "examples/README.md").read_text()
NAMES = [path.name for path in sorted((ROOT / "examples").iterdir()) if path.is_dir() and path.name != "__pycache__"]
ID = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
TIME = re.compile(r"\b[\d.]+ m?s\b")


def typed_in(name):
    """Commands of the section of an example, each with the lines it prints."""
    [section] = [part for part in PAGE.split("\n## ") if f"({name}/" in part]
    block = section.partition("```console\n")[2].partition("```")[0]
    return [(said[0], said[1:]) for said in (part.splitlines() for part in f"\n{block}".split("\n$ ")[1:])]


@pytest.fixture
async def farm(database_url, redis_url, nats_url, bus_prefix, tmp_path, monkeypatch):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "tasks", raising=False)
    async with Farm(database_url, redis_url, nats_url, bus_prefix, faces=services) as farm:
        await farm.show("default")
        monkeypatch.setenv("ROTA_API_URL", farm.replica.listen_url)
        monkeypatch.setenv("ROTA_API_KEY", await Api(farm).key(Role.SUBMITTER))
        yield farm


@pytest.fixture
def typed(monkeypatch, capsys, database_url):
    monkeypatch.setenv("ROTA_POSTGRES_URL", database_url)
    return Terminal(monkeypatch, capsys)


class Typist:
    """Types the lines of a page. Ids and ports are those of the page there, and others here."""

    def __init__(self, farm, typed, spawn):
        self._farm = farm
        self._typed = typed
        self._spawn = spawn
        self._here = {}

    async def type(self, line):
        """What it prints, and whether it may end badly."""
        for there, here in self._here.items():
            line = line.replace(there, here)
        first, *words = shlex.split(os.path.expandvars(line))
        match first:
            case "rota" if words[0] in ("up", "worker"):
                return await self._works(words)
            case "rota":
                said = await self._typed(words)
                ends = {"FAILED after": 1, "TIMEOUT after": 4}
                assert said.status == next((code for word, code in ends.items() if word in said.out), 0), said.err
                return said.out
            case "curl":
                return await _fetched(words)
            case _ if line.endswith("&"):
                return await self._serves([sys.executable, *(["-m", first] if first != "python3" else []), *words[:-1]])
            case "python3":
                return await self._ran([sys.executable, *words])
        raise AssertionError(f"nobody can type {line}")

    def met(self, printed, said):
        """Ids that the page has others for."""
        self._here |= dict(zip(ID.findall(printed), ID.findall(said), strict=False))

    async def _works(self, words):
        given = dict(pairwise(words))
        of = given.get("--app") or (words[-2] if words[0] == "worker" else "")
        if words[0] == "up" or of:
            await self._farm.worker(words[0], of=of, slots=4, gpus=int(given.get("--gpus", 0)))
        return ""

    async def _serves(self, words):
        port = next(word for word in words if word.isdigit())
        self._here[f":{port}"] = f":{free_port()}"
        words = [word if word != port else self._here[f":{port}"][1:] for word in words]
        await self._spawn(None, argv=words)
        await until(lambda: _listens(int(self._here[f":{port}"][1:])), within_s=20, what=" ".join(words))
        return ""

    async def _ran(self, words):
        process = await self._spawn(None, argv=words)
        out, err = await process.output(), await process.errors()
        assert (await process.wait(), err) == (0, "")
        return out


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return bound.getsockname()[1]


def _listens(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


async def _fetched(words):
    """As `curl -s URL [-d DATA] [-H HEADER]` does it."""
    url = next(word for word in words if word.startswith("localhost:"))
    given = dict(pairwise(words))
    name, _, value = given.get("-H", "accept: */*").partition(": ")
    async with httpx.AsyncClient(headers={name: value}, timeout=40) as client:
        answer = await client.request("POST" if "-d" in given else "GET", f"http://{url}", content=given.get("-d"))
        return answer.text


def plain(text):
    lines = rows(text) if isinstance(text, str) else text
    return [" ".join(ID.sub("ID", TIME.sub("TIME", line)).split()) for line in lines]


@pytest.mark.parametrize("name", NAMES)
async def test_an_example_prints_what_its_page_says(farm, typed, spawn, name):
    *commands, (down, _) = typed_in(name)
    assert (commands[0][0].split()[:3], down) == (["rota", "up", "--detach"], "rota down")
    typist = Typist(farm, typed, spawn)
    for line, printed in commands:
        said = await typist.type(line)
        assert plain(said) == plain(printed), line
        typist.met("\n".join(printed), said)


def test_every_example_is_on_the_page():
    assert NAMES == ["agents", "pipeline", "quickstart", "render", "shop", "sweep", "trip", "web"]
    assert all(f"({name}/" in PAGE for name in NAMES)


async def test_a_submission_from_a_file_says_everything(farm, typed, tmp_path):
    cases = {
        "missing.yaml": (None, "cannot be read"),
        "broken.yaml": ("a: [", "neither YAML nor JSON"),
        "list.yaml": ("- a", "is not a submission"),
        "unknown.yaml": ("layres: []", "not a valid submission: Object"),
        "odd.yaml": (f"layers: [{{task: a, input: {2**70}}}]", "is not a valid submission"),
        "empty.json": ('{"layers": []}', "at least one layer"),
    }
    for name, (text, word) in cases.items():
        if text is not None:
            (tmp_path / name).write_text(text)
        said = await typed(f"submit --file {name}")
        assert (said.status, word in said.err) == (2, True), (name, said.err)
    said = await typed("submit --file examples/sweep/job.yaml --show other")
    assert (said.status, "excludes a task and all other options" in said.err) == (2, True)
