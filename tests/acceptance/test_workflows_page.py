"""The workflow and saga guides: their code runs, their YAML equals it, their commands print the documented output."""

import ast
import inspect
import re
import sys
from pathlib import Path

import pytest
import typer

from rota.cli.main import app
from rota.model.access import Role
from rota.model.workflows.spec import encode_workflow
from rota.sdk import load_app
from rota.server import services
from rota.workflow.yaml_loader import parse
from tests.acceptance.test_examples import normalized
from tests.support.api import Api
from tests.support.commands import Terminal
from tests.support.replica_and_worker import Farm
from tests.support.waiting import until

HOWTO = Path(__file__).parents[2] / "docs/howto"
WORKFLOWS, SAGAS = ((HOWTO / name).read_text() for name in ("workflows.md", "sagas.md"))
BLOCKS = re.findall(r"```python\n(.*?)```", WORKFLOWS + SAGAS, re.DOTALL)
MODULE = "\n\n".join(block for block in BLOCKS if "await " not in block)
CALLS = [block for block in BLOCKS if "await " in block]
[TRIP] = re.findall(r"```yaml\n(.*?)```", WORKFLOWS, re.DOTALL)
COMMANDS = re.findall(r"^\$ rota (.*)\n((?:(?!\$ |```).*\n)*)", WORKFLOWS, re.MULTILINE)


@pytest.fixture
async def farm(database_url, redis_url, nats_url, bus_prefix, tmp_path, monkeypatch):
    (tmp_path / "guide.py").write_text(MODULE)
    (tmp_path / "trip.yaml").write_text(TRIP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "guide", raising=False)
    async with Farm(database_url, redis_url, nats_url, bus_prefix, faces=services) as farm:
        await farm.show("default")
        await farm.worker(of="guide.py")
        monkeypatch.setenv("ROTA_API_URL", farm.replica.listen_url)
        monkeypatch.setenv("ROTA_API_KEY", await Api(farm).key(Role.SUBMITTER))
        monkeypatch.setenv("ROTA_POSTGRES_URL", database_url)
        yield farm


@pytest.fixture
async def guide(farm):
    made = load_app.load("guide.py", Path.cwd())
    yield vars(sys.modules["guide"])
    await made.close()


async def test_workflow_guide_code_runs_against_real_servers(guide):
    for block in CALLS:
        code = compile(block, "howto", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if inspect.iscoroutine(ended := eval(code, guide)):
            await ended
    await until(lambda: guide["open_orders"] == [], what="the compensation of the order")
    assert len(CALLS) == 5


async def test_workflow_guide_yaml_equals_python_and_commands_print_documented_output(guide, monkeypatch, capsys):
    assert encode_workflow(parse(TRIP)) == encode_workflow(guide["trip"].spec)
    cli = Terminal(monkeypatch, capsys)
    for line, printed in COMMANDS:
        assert normalized(await cli.out(line)) == normalized(printed), line
    assert len(COMMANDS) == 2


async def test_workflow_commands_accept_python_workflows(guide, monkeypatch, capsys):
    cli = Terminal(monkeypatch, capsys)
    assert "guide.py:trip is a workflow of 3 steps" in await cli.out("workflow validate guide.py:trip")
    result = await cli.out(["workflow", "run", "guide.py:album", "-i", 'pictures=["a"]', "--wait"])
    assert "of album (version 1) is SUCCEEDED" in result
    assert "Nothing changed: publish is the same." in await cli.out("workflow declare guide.py:publish")
    assert "guide.py:trip, guide.py:publish" in (await cli("workflow declare guide.py")).err
    assert "There is no file" in (await cli("workflow validate nobody.py")).err
    Path("empty.py").write_text("from rota import Rota\napp = Rota()\n")
    assert "empty.py declares no workflow: declare one in it." in (await cli("workflow run empty.py")).err


UNKNOWN_RUN = "0192f0c1-2b3a-7c4d-8e5f-60718293a4b5"


async def test_workflow_commands_reject_bad_arguments_and_accept_run_id_prefixes(guide, monkeypatch, capsys):
    cli = Terminal(monkeypatch, capsys)
    for what in ("show", "timeline", "cancel", "pause", "resume", "rollback", "rerun --from a"):
        result = await cli(f"workflow {what} {UNKNOWN_RUN}")
        assert (what, result.status, f"There is no run {UNKNOWN_RUN}" in result.err) == (what, 2, True)
    assert "is for show 'default'" in (await cli("workflow run trip.yaml --show film -i city=Oslo")).err
    assert "city is repeated" in (await cli("workflow run trip.yaml -i city=Oslo -i city=Rome")).err
    ran = await cli.out("workflow run trip.yaml -i city=Oslo --wait")
    assert 'It returned {"city":"Oslo for 2 nights","ticket":"flight-Oslo"}' in ran
    assert "of version 7" in (await cli("workflow run trip --version 7 --dry-run -i city=Oslo")).err
    run = ran.split()[1]
    assert f"Run {run} of trip" in await cli.out(f"workflow show {run[:23]}")
    assert "it succeeded" in (await cli(f"workflow rollback {run[:23]}")).err


def test_workflow_guide_documents_every_command():
    group = typer.main.get_command(app).commands["workflow"]
    documented = {
        word for words in re.findall(r"^rota workflow ([\w|]+)", WORKFLOWS, re.MULTILINE) for word in words.split("|")
    }
    assert documented == set(group.commands) - {"declare", "definitions"}
