"""Runs every command of examples/README.md and compares its output with the page, except ids and times."""

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


def documented_commands(name):
    """Commands in the section of an example, each with its documented output lines."""
    [section] = [part for part in PAGE.split("\n## ") if f"({name}/" in part]
    block = section.partition("```console\n")[2].partition("```")[0]
    return [(lines[0], lines[1:]) for lines in (part.splitlines() for part in f"\n{block}".split("\n$ ")[1:])]


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
def cli(monkeypatch, capsys, database_url):
    monkeypatch.setenv("ROTA_POSTGRES_URL", database_url)
    return Terminal(monkeypatch, capsys)


class CommandRunner:
    """Runs the commands of a page; replaces the ids and ports of the page by those of this run."""

    def __init__(self, farm, cli, spawn):
        self._farm = farm
        self._cli = cli
        self._spawn = spawn
        self._actual = {}

    async def run(self, line):
        """The output of the command; its exit status must match its output."""
        for documented, actual in self._actual.items():
            line = line.replace(documented, actual)
        first, *args = shlex.split(os.path.expandvars(line))
        match first:
            case "rota" if args[0] in ("up", "worker"):
                return await self._start_worker(args)
            case "rota":
                result = await self._cli(args)
                codes = {"FAILED after": 1, "TIMEOUT after": 4}
                expected = next((code for text, code in codes.items() if text in result.out), 0)
                assert result.status == expected, result.err
                return result.out
            case "curl":
                return await _curl(args)
            case _ if line.endswith("&"):
                return await self._start_server(
                    [sys.executable, *(["-m", first] if first != "python3" else []), *args[:-1]]
                )
            case "python3":
                return await self._run_script([sys.executable, *args])
        raise AssertionError(f"unsupported command: {line}")

    def map_ids(self, printed, output):
        """Map the ids of the page to those of this run."""
        self._actual |= dict(zip(ID.findall(printed), ID.findall(output), strict=False))

    async def _start_worker(self, args):
        options = dict(pairwise(args))
        of = options.get("--app") or (args[-2] if args[0] == "worker" else "")
        if args[0] == "up" or of:
            await self._farm.worker(args[0], of=of, slots=4, gpus=int(options.get("--gpus", 0)))
        return ""

    async def _start_server(self, args):
        port = next(word for word in args if word.isdigit())
        self._actual[f":{port}"] = f":{free_port()}"
        args = [word if word != port else self._actual[f":{port}"][1:] for word in args]
        await self._spawn(None, argv=args)
        await until(lambda: _is_listening(int(self._actual[f":{port}"][1:])), within_s=20, what=" ".join(args))
        return ""

    async def _run_script(self, args):
        process = await self._spawn(None, argv=args)
        out, err = await process.output(), await process.errors()
        assert (await process.wait(), err) == (0, "")
        return out


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return bound.getsockname()[1]


def _is_listening(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


async def _curl(args):
    """Equivalent of `curl -s URL [-d DATA] [-H HEADER]`."""
    url = next(word for word in args if word.startswith("localhost:"))
    options = dict(pairwise(args))
    name, _, value = options.get("-H", "accept: */*").partition(": ")
    async with httpx.AsyncClient(headers={name: value}, timeout=40) as client:
        response = await client.request(
            "POST" if "-d" in options else "GET", f"http://{url}", content=options.get("-d")
        )
        return response.text


def normalized(text):
    lines = rows(text) if isinstance(text, str) else text
    return [" ".join(ID.sub("ID", TIME.sub("TIME", line)).split()) for line in lines]


@pytest.mark.parametrize("name", NAMES)
async def test_example_commands_print_the_documented_output(farm, cli, spawn, name):
    *commands, (down, _) = documented_commands(name)
    assert (commands[0][0].split()[:3], down) == (["rota", "up", "--detach"], "rota down")
    runner = CommandRunner(farm, cli, spawn)
    for line, printed in commands:
        output = await runner.run(line)
        assert normalized(output) == normalized(printed), line
        runner.map_ids("\n".join(printed), output)


def test_examples_page_lists_every_example():
    assert NAMES == ["agents", "pipeline", "quickstart", "render", "shop", "sweep", "trip", "web"]
    assert all(f"({name}/" in PAGE for name in NAMES)


async def test_submit_file_rejects_invalid_files_and_extra_options(farm, cli, tmp_path):
    cases = {
        "missing.yaml": (None, "cannot be read"),
        "broken.yaml": ("a: [", "neither YAML nor JSON"),
        "list.yaml": ("- a", "is not a submission"),
        "unknown.yaml": ("layres: []", "not a valid submission: Object"),
        "odd.yaml": (f"layers: [{{task: a, input: {2**70}}}]", "is not a valid submission"),
        "octal.yaml": ("layers:\n  - task: a\n    cores: 010", "octal.yaml:3: 010 is ambiguous"),
        "empty.json": ('{"layers": []}', "at least one layer"),
    }
    for name, (text, message) in cases.items():
        if text is not None:
            (tmp_path / name).write_text(text)
        result = await cli(f"submit --file {name}")
        assert (result.status, message in result.err) == (2, True), (name, result.err)
    result = await cli("submit --file examples/sweep/job.yaml --show other")
    assert (result.status, "excludes a task and all other options" in result.err) == (2, True)
