"""Usage errors: `--json` as an alias, and Typer's errors as one Rota sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import typer
from typer.core import TyperGroup

from rota.model.errors import InvalidInput

# Typer has no public name for this class; its private name depends on the version.
UsageError: Final[type[Exception]] = typer.BadParameter.__mro__[1]

_EXTRA: Final = re.compile(r"Got unexpected extra argument\S* \((.*)\)")
_MISSING_VALUE: Final = re.compile(r"Option '(.*)' requires an argument")
_CHOICE: Final = re.compile(r"'(?P<given>[^']*)' is not one of (?P<choices>.+?)\.?$")


class RootGroup(TyperGroup):
    """The root command group. Translates `--json` to `-o json` for every command, except after `--`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(translate_args(args)))


def translate_args(args: Sequence[str]) -> Iterator[str]:
    own_args = args.index("--") if "--" in args else len(args)
    for at, word in enumerate(args):
        yield "--output=json" if at < own_args and word == "--json" else word


def to_invalid_input(error: Any) -> InvalidInput:
    """Typer's usage error as `InvalidInput`."""
    return InvalidInput(_sentence(error, _command_path(error)))


def help_text(error: Any) -> str | None:
    """The help of a group that was called without a command; None for real errors."""
    return str(error.format_message()) if type(error).__name__ == "NoArgsIsHelpError" else None


def _command_path(error: Any) -> str:
    """The command as typed, without arguments."""
    names, context = [], error.ctx
    while context is not None:
        names.append(context.info_name)
        context = context.parent
    return " ".join(reversed(names)) or "rota"


def _sentence(error: Any, command: str) -> str:
    message = error.message.rstrip(".")
    see = f"see `{command} --help`."
    if hasattr(error, "possibilities"):
        near = f"did you mean {min(error.possibilities)}?" if error.possibilities else see
        return f"{command} has no option {error.option_name[:64]}: {near}"
    if message.startswith("No such command"):
        typed, _, near = message.removeprefix("No such command ").partition(". Did you mean ")
        near = near.rstrip("?").replace("'", "")
        return f"There is no command {typed}: {f'did you mean {_join_or(near)}?' if near else see}"
    if type(error).__name__ == "MissingParameter":
        return f"{_parameter_name(error)} is missing: {see}"
    if hasattr(error, "param"):
        return _wrong_value(error, message.removeprefix("Value error, "), see)
    if found := _EXTRA.fullmatch(message):
        return f"Unexpected argument {found[1][:64]} for {command}: {see}"
    if found := _MISSING_VALUE.fullmatch(message):
        return f"{found[1]} needs a value: {see}"
    return f"{message[0].upper()}{message[1:]}: {see}"


def _parameter_name(error: Any) -> str:
    param = error.param
    if param is None:
        return "An argument"
    return str(param.opts[0] if param.param_type_name == "option" else param.metavar or param.name.upper())


def _wrong_value(error: Any, message: str, see: str) -> str:
    if choice := _CHOICE.search(message):
        import difflib

        choices = [word.strip(" '") for word in choice["choices"].split(",")]
        near = difflib.get_close_matches(choice["given"], choices, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(choices)}."
        return f"{_parameter_name(error)} cannot be {choice['given'][:64]!r}: {hint}"
    if "valid integer" in message:
        message = "it must be a whole number"
    elif "valid number" in message:
        message = "it must be a number"
    return f"{_parameter_name(error)} is invalid: {message[0].lower()}{message[1:]}; {see}"


def _join_or(words: str) -> str:
    first, _, last = words.rpartition(", ")
    return f"{first} or {last}" if first else last
