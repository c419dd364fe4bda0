"""Usage errors are one line with a suggestion and a code; help is fast; shell completion works."""

import os
import resource
import subprocess
import sys

import pytest

from rota.cli.core.exit_codes import ExitCode
from rota.cli.core.usage_errors import translate_args
from tests.support.commands import Terminal

HELP_S = 0.3
USAGE_ERRORS = [
    ("shwo", "There is no command 'shwo': did you mean show?"),
    ("show lst", "There is no command 'lst': did you mean list or set?"),
    ("xyzzy", "There is no command 'xyzzy': see `rota --help`."),
    ("jobs --shw duck", "rota jobs has no option --shw: did you mean --show?"),
    ("jobs --xyzzy", "rota jobs has no option --xyzzy: see `rota jobs --help`."),
    ("jobs -o jsn", "--output cannot be 'jsn': did you mean json?"),
    ("jobs -o 7", "--output cannot be '7': use one of text, wide, json, yaml."),
    ("jobs --limit many", "--limit is invalid: it must be a whole number; see `rota jobs --help`."),
    ("jobs more words", "Unexpected argument more words for rota jobs: see `rota jobs --help`."),
    ("job show", "JOB is missing: see `rota job show --help`."),
    ("sub create duck main --size 3", "--burst is missing: see `rota sub create --help`."),
    ("jobs --limit", "--limit needs a value: see `rota --help`."),
    ("submit --after-failed explode noop", "--after-failed cannot be 'explode': use one of cancel, fail, run."),
    ("top --every 0.01", "--every is invalid: "),
    ("jobs --label nothing", "'nothing' is not a valid label: use key=value."),
    ("jobs --state runing", "There is no state 'RUNING': did you mean RUNNING?"),
    ("submit", "There is no task or command, or both: "),
    ("submit noop --at sometime", "'sometime' "),
    ("dlq show x", "'x' is not a valid id: "),
]


@pytest.fixture
def cli(monkeypatch, capsys, tmp_path):
    """No server is configured, so a command that needs one would fail with that error first."""
    monkeypatch.chdir(tmp_path)
    return Terminal(monkeypatch, capsys)


@pytest.mark.parametrize(("line", "sentence"), USAGE_ERRORS)
async def test_usage_error_is_one_line_with_a_code(cli, line, sentence):
    result = await cli(line)
    assert (result.status, result.out) == (ExitCode.BAD_INPUT, "")
    assert result.err.startswith(f"rota: {sentence}"), result.err
    assert result.err.count("\n") == 1
    assert result.err.endswith(("[invalid_input]\n", "[not_found]\n"))


async def test_command_group_alone_prints_its_help(cli):
    result = await cli("job")
    assert (result.status, result.err) == (ExitCode.BAD_INPUT, "")
    assert "Usage: rota job [OPTIONS] COMMAND" in result.out
    assert "watch" in result.out


async def test_json_option_is_translated_only_before_double_dash(cli):
    as_json = await cli.out("config --json")
    assert as_json == await cli.out("config show -o json")
    assert [*translate_args(["submit", "--json", "--", "echo", "--json"])] == [
        *("submit", "--output=json", "--", "echo", "--json")
    ]


def test_help_uses_less_than_300_ms_of_cpu():
    """Measures CPU time, which does not depend on other load; best of three."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "rota.cli", "--help"], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < HELP_S, times


def test_shell_completion_offers_commands_and_options():
    def offered(words):
        env = {**os.environ, "_ROTA_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "2"}
        run = subprocess.run([sys.executable, "-m", "rota.cli"], env=env, capture_output=True, text=True, check=False)
        return run.stdout.split()

    assert offered("rota job wat") == ["watch"]
    assert "--output" in offered("rota jobs --out")


@pytest.mark.parametrize(
    ("given", "red", "any_styles"),
    [({}, False, False), ({"FORCE_COLOR": "1"}, True, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, True)],
)
def test_colours_follow_force_color_and_no_color(given, red, any_styles, tmp_path):
    env = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "NO_COLOR")} | given
    words = [sys.executable, "-m", "rota.cli", "doctor"]
    run = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == ExitCode.FAILED
    assert ("31m" in run.stdout, "\x1b[" in run.stdout) == (red, any_styles)
