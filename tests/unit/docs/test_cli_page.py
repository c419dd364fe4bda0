"""docs/reference/cli.md matches the code, and every command supports every output format."""

from pathlib import Path

import typer

from rota.cli.core.exit_codes import EXIT_CODE_MEANINGS, ExitCode, exit_code_of_job
from rota.cli.main import app
from rota.model.job_states import JobState
from tools.docs.cli_reference import render_page

PAGE = Path(__file__).resolve().parents[3] / "docs/reference/cli.md"
WITHOUT_OUTPUT_OPTION = {"rota up", "rota down", "rota server", "rota kernel", "rota worker", "rota demo"}


def commands(command, path="rota"):
    found = getattr(command, "commands", None)
    if found is None:
        return {path: command}
    return {name: each for part, below in found.items() for name, each in commands(below, f"{path} {part}").items()}


ALL = commands(typer.main.get_command(app))


def test_cli_page_matches_the_code():
    assert PAGE.read_text() == render_page()


def test_every_command_has_help_and_an_output_option():
    for path, command in ALL.items():
        assert len(command.help) > 20, path
        options = {name for param in command.params for name in param.opts}
        assert ({"-o", "--output"} <= options) is (path not in WITHOUT_OUTPUT_OPTION), path


def test_every_parameter_has_help():
    for path, command in ALL.items():
        for param in command.params:
            assert param.help, f"{path}: {param.name}"


def test_every_exit_code_has_a_meaning_and_every_terminal_job_state_its_own_code():
    assert set(EXIT_CODE_MEANINGS) == set(ExitCode)
    ends = [state for state in JobState if state.terminal]
    assert {state: exit_code_of_job(state) for state in ends if state is not JobState.FAILED}.keys() == set(ends) - {
        "FAILED"
    }
    assert len({exit_code_of_job(state) for state in ends}) == len(ends)
