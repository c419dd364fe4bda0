"""Generates docs/reference/cli.md from the commands. A test keeps it up to date."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from rota.cli.core.exit_codes import EXIT_CODE_MEANINGS
from rota.cli.main import app

_HEAD = """\
# The command line

All commands, as in `rota COMMAND --help`. `tools.docs.cli_reference` generates this page from the code; a test compares
the two.

## Common to all commands

* **Servers.** Commands connect to PostgreSQL (a few also to Redis and NATS) at the configured URLs, or to the servers
  of the `rota up` whose data directory is here. `rota --config FILE` selects a settings file other than `./rota.yaml`.
* **Output formats.** `-o text` is for people, `-o wide` adds columns and full ids, `-o json` and `-o yaml` are one
  document with the same content; `--json` is short for `-o json`. Every command that prints data accepts them.
* **Names.** A job is named by its id, an id prefix (4 characters or more), or its name (the newest job with it).
  Irreversible commands need an id, or a name that exactly one live job has. Layers and keys are also named by id
  prefix. For an unknown name, the closest one is suggested.
* **Colours** appear only in terminals, and never with `NO_COLOR`. A pipe gets full ids and full lines.
* **Errors** are one sentence on standard error that says what to do, and a stable code in brackets.
* **Completion.** `rota --install-completion` installs it for the current shell (bash, zsh, fish, PowerShell), and
  `rota --show-completion` prints it.

## Exit statuses

| status | meaning |
|---|---|
"""


def render_page() -> str:
    """The page as Markdown."""
    root: Any = typer.main.get_command(app)
    commands = [*_commands(root, "rota", None)]
    parts = [
        _HEAD.rstrip("\n"),
        *(f"| {status.value} | {meaning} |" for status, meaning in EXIT_CODE_MEANINGS.items()),
        "",
    ]
    parts += ["## Commands", "", "| command | what it does |", "|---|---|"]
    parts += [f"| [`{path}`](#{_anchor(path)}) | {_cell(_first_paragraph(command))} |" for path, command, _ in commands]
    for path, command, context in commands:
        parts += ["", *_section(path, command, context)]
    return "\n".join(parts) + "\n"


def _commands(command: Any, path: str, parent: Any) -> Iterator[tuple[str, Any, Any]]:
    """Leaf commands, in the order of the help."""
    context = typer.Context(command, parent=parent, info_name=path.rpartition(" ")[2])
    found = getattr(command, "commands", None)
    if found is None:
        yield path, command, context
        return
    for name in command.list_commands(context):
        if not found[name].hidden:
            yield from _commands(found[name], f"{path} {name}", context)


def _section(path: str, command: Any, context: Any) -> Iterator[str]:
    pieces = " ".join(command.collect_usage_pieces(context))
    yield f"### {path}"
    yield ""
    yield f"    {path} {pieces}".rstrip()
    yield ""
    yield "\n\n".join(" ".join(part.split()) for part in (command.help or "").split("\n\n"))
    rows = [_row(param, record) for param in command.params if (record := param.get_help_record(context)) is not None]
    if rows:
        yield ""
        yield "| | |"
        yield "|---|---|"
        for names, text in rows:
            yield f"| `{_cell(names)}` | {_cell(text)} |"


def _row(param: Any, record: tuple[str, str]) -> tuple[str, str]:
    """Arguments are shown by their metavar alone."""
    names, text = record
    return (param.metavar.strip("[]") if param.param_type_name == "argument" and param.metavar else names, text)


def _first_paragraph(command: Any) -> str:
    return " ".join((command.help or "").split("\n\n")[0].split())


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _anchor(path: str) -> str:
    return path.replace(" ", "-")
