"""docs/howto/policy.md: its files are written, its commands typed, and what they print compared."""

import re
from pathlib import Path

import pytest

from rota.policy.loader import parse, snapshot_id
from tests.support.commands import Terminal

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "policy.md").read_text()
FILES = re.findall(r"```yaml\n# ([\w.]+)\n(.*?)```", PAGE, re.DOTALL)
FRAGMENTS = [text for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL) if not text.startswith("# ")]
TYPED = re.findall(r"```console\n\$ rota (.*?)\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def typed(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES:
        Path(name).write_text(f"# {name}\n{text}")
    return Terminal(monkeypatch, capsys)


@pytest.mark.parametrize(("line", "printed"), TYPED)
async def test_what_the_page_types_prints_what_it_says(typed, line, printed):
    said = await typed(line)
    expected = printed.replace("SNAPSHOT", snapshot_id(Path("policy.yaml").read_text()))
    assert [row.split() for row in (said.out + said.err).splitlines()] == [row.split() for row in expected.splitlines()]


@pytest.mark.parametrize("text", FRAGMENTS)
def test_what_the_page_shows_is_a_policy(text):
    assert parse(text).rules.ordered


def test_the_page_has_files_commands_and_fragments():
    assert (len(FILES), len(TYPED), len(FRAGMENTS)) == (4, 4, 1)
