"""The README quick start in a new directory with an empty home directory."""

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

from tests.support.harness.servers import options_for_tests

README = (Path(__file__).parents[2] / "README.md").read_text()
QUICK = README.partition("## Quick start\n")[2].partition("\n## ")[0]
ID = r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"
TIME = r"\b[\d.]+ m?s\b"
DIFFERS = re.compile(rf"{ID}|{TIME}|(?<=process )\d+|(?<=:)\d{{4,5}}\b|/\S+/\.rota")


def block(kind):
    return QUICK.partition(f"```{kind}\n")[2].partition("```")[0]


def normalized(text):
    return [DIFFERS.sub("*", line) for line in text.splitlines()]


@pytest.mark.slow("starts a full installation")
@pytest.mark.timeout(120)
async def test_quick_start_in_a_new_directory_prints_the_documented_output(tmp_path):
    setup, _, commands = block("sh").partition("\n")
    assert setup.startswith("make setup && . .venv/bin/activate"), "these tests already run in that environment"
    home, folder = tmp_path / "home", tmp_path / "shots"
    home.mkdir()
    folder.mkdir()
    bins = {f"ROTA_LOCAL_{name.upper()}_BIN": path for name, path in options_for_tests(tmp_path).bins.items()}
    inherited = {name: os.environ[name] for name in ("PYTHONPATH", "LANG") if name in os.environ}
    environment = {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(home),
        "ROTA_LISTEN_PORT": "0",  # the documented port may be in use here
        **bins,
        **inherited,
    }
    shell = await asyncio.create_subprocess_exec(
        "bash",
        "-c",
        f"trap 'rota down >/dev/null 2>&1' EXIT\n{commands}",
        cwd=folder,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,  # a terminal shows both
    )
    printed, _ = await shell.communicate()
    assert normalized(printed.decode()) == normalized(block("console"))
    assert list(home.iterdir()) == []


def test_quick_start_has_about_twenty_lines():
    assert 15 <= len(block("sh").splitlines()) <= 22
