"""docs/reference/cli.md is what the code says, and every command can be asked for every form."""

from pathlib import Path

import typer

from rota.cli.core.exit_codes import EXIT_CODE_MEANINGS, ExitCode, exit_code_of_job
from rota.cli.main import app
from rota.model.job_states import JobState
from tools.docs.cli_reference import render_page

PAGE = Path(__file__).resolve().parents[3] / "docs/reference/cli.md"
ANSWERS_NOTHING = {"rota up", "rota down", "rota server", "rota kernel", "rota worker", "rota demo"}


def commands(command, path="rota"):
    found = getattr(command, "commands", None)
    if found is None:
        return {path: command}
    return {name: each for word, below in found.items() for name, each in commands(below, f"{path} {word}").items()}


ALL = commands(typer.main.get_command(app))


def test_the_page_is_what_the_code_says():
    assert PAGE.read_text() == render_page()


def test_every_command_says_what_it_is_for_and_answers_in_every_form():
    for path, command in ALL.items():
        assert len(command.help) > 20, path
        options = {name for param in command.params for name in param.opts}
        assert ({"-o", "--output"} <= options) is (path not in ANSWERS_NOTHING), path


def test_every_parameter_says_what_it_is_for():
    for path, command in ALL.items():
        for param in command.params:
            assert param.help, f"{path}: {param.name}"


def test_every_exit_status_has_a_meaning_and_every_end_of_a_job_a_status():
    assert set(EXIT_CODE_MEANINGS) == set(ExitCode)
    ends = [state for state in JobState if state.terminal]
    assert {state: exit_code_of_job(state) for state in ends if state is not JobState.FAILED}.keys() == set(ends) - {
        "FAILED"
    }
    assert len({exit_code_of_job(state) for state in ends}) == len(ends)
