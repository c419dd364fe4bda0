"""What was typed: `--json` as people know it, and one sentence where it cannot be understood."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import typer
from typer.core import TyperGroup

from rota.model.errors import InvalidInput

# Typer has no public name for it, and the same class under two private ones, by its version.
UsageError: Final[type[Exception]] = typer.BadParameter.__mro__[1]

_EXTRA: Final = re.compile(r"Got unexpected extra argument\S* \((.*)\)")
_MISSING_VALUE: Final = re.compile(r"Option '(.*)' requires an argument")
_CHOICE: Final = re.compile(r"'(?P<given>[^']*)' is not one of (?P<choices>.+?)\.?$")


class RootGroup(TyperGroup):
    """All commands. `--json` is `-o json` for each of them; what follows `--` belongs to somebody else."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(translate_args(args)))


def translate_args(args: Sequence[str]) -> Iterator[str]:
    ours = args.index("--") if "--" in args else len(args)
    for at, word in enumerate(args):
        yield "--output=json" if at < ours and word == "--json" else word


def to_invalid_input(error: Any) -> InvalidInput:
    """Of what typer could not understand, in the words of every other error."""
    return InvalidInput(_sentence(error, _command_path(error)))


def help_text(error: Any) -> str | None:
    """Where nothing but the name of a group was typed: its help is the answer."""
    return str(error.format_message()) if type(error).__name__ == "NoArgsIsHelpError" else None


def _command_path(error: Any) -> str:
    """What was typed of it before its arguments; those of groups in between are left out."""
    names, context = [], error.ctx
    while context is not None:
        names.append(context.info_name)
        context = context.parent
    return " ".join(reversed(names)) or "rota"


def _sentence(error: Any, command: str) -> str:
    told = error.message.rstrip(".")
    see = f"see `{command} --help`."
    if hasattr(error, "possibilities"):
        near = f"did you mean {min(error.possibilities)}?" if error.possibilities else see
        return f"{command} has no option {error.option_name[:64]}: {near}"
    if told.startswith("No such command"):
        typed, _, near = told.removeprefix("No such command ").partition(". Did you mean ")
        near = near.rstrip("?").replace("'", "")
        return f"There is no command {typed}: {f'did you mean {_join_or(near)}?' if near else see}"
    if type(error).__name__ == "MissingParameter":
        return f"{_parameter_name(error)} is missing: {see}"
    if hasattr(error, "param"):
        return _wrong_value(error, told.removeprefix("Value error, "), see)
    if found := _EXTRA.fullmatch(told):
        return f"{command} takes fewer words, and {found[1][:64]} is too many: {see}"
    if found := _MISSING_VALUE.fullmatch(told):
        return f"{found[1]} needs a value: {see}"
    return f"{told[0].upper()}{told[1:]}: {see}"


def _parameter_name(error: Any) -> str:
    param = error.param
    if param is None:
        return "Something"
    return str(param.opts[0] if param.param_type_name == "option" else param.metavar or param.name.upper())


def _wrong_value(error: Any, told: str, see: str) -> str:
    if choice := _CHOICE.search(told):
        import difflib

        choices = [word.strip(" '") for word in choice["choices"].split(",")]
        near = difflib.get_close_matches(choice["given"], choices, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"it is one of {', '.join(choices)}."
        return f"{_parameter_name(error)} cannot be {choice['given'][:64]!r}: {hint}"
    if "valid integer" in told:
        told = "it is a whole number"
    elif "valid number" in told:
        told = "it is a number"
    return f"{_parameter_name(error)} is wrong: {told[0].lower()}{told[1:]}; {see}"


def _join_or(words: str) -> str:
    first, _, last = words.rpartition(", ")
    return f"{first} or {last}" if first else last
