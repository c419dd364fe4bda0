"""docs/howto/outputs.md: its policy compiles, its commands print what it shows, and it lists every match field."""

import re
import shlex
from pathlib import Path
from typing import get_args

import pytest

from rota.model.access import Role
from rota.model.policy.outputs import OutputMeta, OutputScanMode
from rota.policy.loader import parse
from rota.policy.output.evaluate import CompiledOutputPolicy
from rota.policy.output.rules import Detector, OutputMatch, OutputRules, ScannerName
from rota.server import services
from tests.support.api import Api
from tests.support.commands import Terminal
from tests.support.outputs import SECRET, OutputPolicyFarm
from tests.support.queue import sql

PAGE = (Path(__file__).parents[4] / "docs" / "howto" / "outputs.md").read_text()
ID = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")


def block(kind, number=0):
    return PAGE.split(f"```{kind}\n")[number + 1].partition("```")[0]


def policy():
    sections = parse(block("yaml")).sections
    return OutputRules(section=sections["output_policy"], rules=sections["output_rules"])


def test_page_policy_compiles_and_sets_topic_modes():
    ready = CompiledOutputPolicy(policy())
    assert [ready.mode(topic) for topic in ("job.pay.x", "job.legal", "job.x")] == [
        OutputScanMode.HOLD,
        OutputScanMode.FAIL_CLOSED,
        OutputScanMode.PASS,
    ]
    assert ready.check_metadata(OutputMeta(show="film", topic="x", bytes=11 * 2**20)).word.rule == "large"


def test_page_lists_every_match_field_scanner_and_detector():
    named = set(re.findall(r"`(\w+)`", PAGE.partition("| a match may name")[2].partition("## ")[0]))
    assert {*OutputMatch.__struct_fields__, *get_args(ScannerName), *get_args(Detector)} <= named


TOKEN = sql("SELECT token FROM rota.output")


@pytest.fixture
async def cluster(database_url, redis_url, nats_url, bus_prefix):
    farm = OutputPolicyFarm(database_url, redis_url, nats_url, bus_prefix, rules=policy().rules, faces=services)
    async with farm as cluster:
        await cluster.show()
        await cluster.worker()
        yield cluster


def normalized(text):
    """The lines without what varies between runs: ids, times, server names and column widths."""
    text = ID.sub("ID", text)
    text = re.sub(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(?::\d\d)?Z?", "WHEN", text)
    text = re.sub(r"^((?:sync|async|person) +\S+ +\S+ +)\S+", r"\1server", text, flags=re.MULTILINE)
    return [" ".join(line.split()) for line in text.strip().splitlines()]


async def test_page_commands_print_the_documented_output(cluster, monkeypatch, capsys, database_url):
    monkeypatch.setenv("ROTA_POSTGRES_URL", database_url)
    monkeypatch.setenv("ROTA_API_URL", cluster.replica.listen_url)
    monkeypatch.setenv("ROTA_API_KEY", await Api(cluster).key(Role.OPERATOR))
    terminal = Terminal(monkeypatch, capsys)
    job = await cluster.submit("echo", {"note": f"see {SECRET}"})
    await cluster.state(job, "OUTPUT_QUARANTINED")
    page = block("console").replace("4096", str(await cluster.database.value(TOKEN)))
    for part in f"\n{page}".split("\n$ rota ")[1:]:
        line, _, expected = part.partition("\n")
        result = await terminal(shlex.split(line))
        assert (result.status, result.err) == (0, ""), result
        assert normalized(result.out) == normalized(expected), line
    await cluster.state(job, "SUCCEEDED")
