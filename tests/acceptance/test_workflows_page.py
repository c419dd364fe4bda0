"""The guides to workflows and sagas: their code runs, their YAML says the same, their commands print what they say."""

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
from tests.acceptance.test_examples import plain
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
TYPED = re.findall(r"^\$ rota (.*)\n((?:(?!\$ |```).*\n)*)", WORKFLOWS, re.MULTILINE)


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


async def test_their_code_runs_against_real_servers(guide):
    for block in CALLS:
        code = compile(block, "howto", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if inspect.iscoroutine(ended := eval(code, guide)):
            await ended
    await until(lambda: guide["open_orders"] == [], what="the hat to be called off")
    assert len(CALLS) == 5


async def test_their_yaml_says_the_same_and_their_commands_print_what_they_say(guide, monkeypatch, capsys):
    assert encode_workflow(parse(TRIP)) == encode_workflow(guide["trip"].spec)
    typed = Terminal(monkeypatch, capsys)
    for line, printed in TYPED:
        assert plain(await typed.out(line)) == plain(printed), line
    assert len(TYPED) == 2


async def test_a_workflow_in_python_is_run_by_the_same_commands(guide, monkeypatch, capsys):
    typed = Terminal(monkeypatch, capsys)
    assert "guide.py:trip is a workflow of 3 steps" in await typed.out("workflow validate guide.py:trip")
    said = await typed.out(["workflow", "run", "guide.py:album", "-i", 'pictures=["a"]', "--wait"])
    assert "of album (version 1) is SUCCEEDED" in said
    assert "Nothing changed: publish is the same." in await typed.out("workflow declare guide.py:publish")
    assert "guide.py:trip, guide.py:publish" in (await typed("workflow declare guide.py")).err
    assert "There is no file" in (await typed("workflow validate nobody.py")).err
    Path("empty.py").write_text("from rota import Rota\napp = Rota()\n")
    assert "empty.py declares no workflow: declare one in it." in (await typed("workflow run empty.py")).err


NOBODY = "0192f0c1-2b3a-7c4d-8e5f-60718293a4b5"


async def test_what_a_careless_hand_types_is_refused_and_runs_go_by_the_beginning_of_their_ids(
    guide, monkeypatch, capsys
):
    typed = Terminal(monkeypatch, capsys)
    for what in ("show", "timeline", "cancel", "pause", "resume", "rollback", "rerun --from a"):
        said = await typed(f"workflow {what} {NOBODY}")
        assert (what, said.status, f"There is no run {NOBODY}" in said.err) == (what, 2, True)
    assert "is for show 'default'" in (await typed("workflow run trip.yaml --show film -i city=Oslo")).err
    assert "city is repeated" in (await typed("workflow run trip.yaml -i city=Oslo -i city=Rome")).err
    ran = await typed.out("workflow run trip.yaml -i city=Oslo --wait")
    assert 'It returned {"city":"Oslo for 2 nights","ticket":"flight-Oslo"}' in ran
    assert "of version 7" in (await typed("workflow run trip --version 7 --dry-run -i city=Oslo")).err
    run = ran.split()[1]
    assert f"Run {run} of trip" in await typed.out(f"workflow show {run[:23]}")
    assert "it succeeded" in (await typed(f"workflow rollback {run[:23]}")).err


def test_every_command_of_workflows_is_told():
    group = typer.main.get_command(app).commands["workflow"]
    told = {
        word for words in re.findall(r"^rota workflow ([\w|]+)", WORKFLOWS, re.MULTILINE) for word in words.split("|")
    }
    assert told == set(group.commands) - {"declare", "definitions"}
