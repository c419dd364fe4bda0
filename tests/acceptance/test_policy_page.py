"""docs/howto/policy.md: writes its files, runs its commands and compares their output with the page."""

import re
from pathlib import Path

import pytest

from rota.policy.loader import parse, snapshot_id
from tests.support.commands import Terminal

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "policy.md").read_text()
FILES = re.findall(r"```yaml\n# ([\w.]+)\n(.*?)```", PAGE, re.DOTALL)
FRAGMENTS = [text for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL) if not text.startswith("# ")]
COMMANDS = re.findall(r"```console\n\$ rota (.*?)\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def cli(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES:
        Path(name).write_text(f"# {name}\n{text}")
    return Terminal(monkeypatch, capsys)


@pytest.mark.parametrize(("line", "printed"), COMMANDS)
async def test_policy_page_commands_print_the_documented_output(cli, line, printed):
    result = await cli(line)
    expected = printed.replace("SNAPSHOT", snapshot_id(Path("policy.yaml").read_text()))
    assert [row.split() for row in (result.out + result.err).splitlines()] == [
        row.split() for row in expected.splitlines()
    ]


@pytest.mark.parametrize("text", FRAGMENTS)
def test_policy_page_fragments_parse_as_policies(text):
    assert parse(text).rules.ordered


def test_policy_page_has_the_expected_number_of_blocks():
    assert (len(FILES), len(COMMANDS), len(FRAGMENTS)) == (4, 4, 1)
