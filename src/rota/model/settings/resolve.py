"""Resolves file and environment into one tree: environment over file over default.

All problems are collected and reported together, one line each; then no value is used. The reader of the file
(`rota.infra.settings_file`) passes its content as `SettingsFileEntry` values, so this module does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal

import msgspec

from rota.model.errors import InvalidSetting
from rota.model.jobs.work import FRAME_ENV
from rota.model.settings.kinds import SettingValue
from rota.model.settings.leaves import Leaf, build, leaves
from rota.model.settings.masking import masked_url
from rota.model.settings.names import CONFIG_ENV, env_suggestion, known_paths, normalize_name, suggestion
from rota.model.settings.rules import conflicts
from rota.model.settings.tree import Settings

PROBLEMS_SHOWN_MAX: Final = 20


class UnsupportedValue(msgspec.Struct, frozen=True):
    """A value in the file that is neither text nor a section, such as "a list"."""

    what: str


class SettingsFileEntry(msgspec.Struct, frozen=True):
    """One key of the settings file with its value or the entries below it; None: a key without a value."""

    key: str
    line: int
    value: str | tuple[SettingsFileEntry, ...] | UnsupportedValue | None


class SettingOrigin(msgspec.Struct, frozen=True):
    """Origin of a value: `where` is `rota.yaml:12` or the name of a variable."""

    source: Literal["default", "file", "environment"] = "default"
    where: str = ""

    def __str__(self) -> str:
        return self.where or self.source


DEFAULT_ORIGIN = SettingOrigin()


class LoadedSettings(msgspec.Struct, frozen=True):
    """The tree, and the origin of each value by path."""

    settings: Settings
    origins: Mapping[str, SettingOrigin]


class SettingInput(msgspec.Struct, frozen=True):
    leaf: Leaf
    text: str | None
    origin: SettingOrigin


def resolve(
    entries: Sequence[SettingsFileEntry] = (), environ: Mapping[str, str] | None = None, *, file: str = "rota.yaml"
) -> LoadedSettings:
    """The tree described by `entries` of `file` and by `environ`; raises InvalidSetting with every problem."""
    problems: list[str] = []
    values: dict[str, SettingValue] = {}
    origins = dict.fromkeys(leaves(), DEFAULT_ORIGIN)
    invalid: set[str] = set()
    inputs = [*_from_file(entries, file, problems), *_from_environment(environ or {}, problems)]
    for item in inputs:
        path = item.leaf.path
        try:
            values[path] = _read(item)
        except ValueError as error:
            invalid.add(path)
            problems.append(f"{item.origin}: {path} {error}; it must be {item.leaf.kind.allowed}.")
        else:
            origins[path] = item.origin
    settings = build(Settings, values)
    problems += _contradictions(settings, origins, invalid)
    if problems:
        shown = problems[:PROBLEMS_SHOWN_MAX]
        more = len(problems) - len(shown)
        rest = [f"... and {more} more."] if more else []
        raise InvalidSetting("\n".join([*shown, *rest]), problems=shown)
    return LoadedSettings(settings, origins)


def _read(setting: SettingInput) -> SettingValue:
    kind = setting.leaf.kind
    if not setting.text and setting.leaf.default is None:
        return None
    if setting.text is None:
        raise ValueError("has no value")
    try:
        return kind.read(setting.text)
    except ValueError:
        raise ValueError(f"is {kind.show_invalid(setting.text)}") from None


def _from_file(entries: Sequence[SettingsFileEntry], file: str, problems: list[str]) -> Iterator[SettingInput]:
    lines: dict[str, int] = {}
    pending = [("", entry) for entry in reversed(entries)]
    while pending:
        prefix, entry = pending.pop()
        written = prefix + entry.key
        where = f"{file}:{entry.line}"
        path = known_paths().get(normalize_name(written))
        if path is None:
            problems.append(f"{where}: unknown setting {_shortened(written)}{suggestion(written)}")
        elif path in lines:
            problems.append(f"{where}: {path} is already set in line {lines[path]}: keep one of them.")
        else:
            lines[path] = entry.line
            if leaf := leaves().get(path):
                yield from _value(leaf, entry, where, problems)
            elif isinstance(entry.value, tuple):
                pending += [(path + ".", below) for below in reversed(entry.value)]
            elif entry.value is not None:
                problems.append(f"{where}: {path} is a section: write its settings below it, indented.")


def _value(leaf: Leaf, entry: SettingsFileEntry, where: str, problems: list[str]) -> Iterator[SettingInput]:
    match entry.value:
        case UnsupportedValue(what=what):
            problems.append(f"{where}: {leaf.path} is {what}; it must be {leaf.kind.allowed}.")
        case tuple():
            problems.append(f"{where}: {leaf.path} is a section here; it must be {leaf.kind.allowed}.")
        case text:
            yield SettingInput(leaf, text, SettingOrigin("file", where))


def _from_environment(environ: Mapping[str, str], problems: list[str]) -> Iterator[SettingInput]:
    known = {CONFIG_ENV, *FRAME_ENV}
    for leaf in leaves().values():
        known.update(leaf.env_names)
        names = [name for name in leaf.env_names if environ.get(name, "").strip()]
        if len(names) > 1:
            problems.append(f"{' and '.join(names)} are the same setting {leaf.path}: set only one of them.")
        elif names:
            yield SettingInput(leaf, environ[names[0]].strip(), SettingOrigin("environment", names[0]))
    unknown = sorted(name for name in environ if name.startswith("ROTA_") and name not in known)
    problems += [f"Unknown setting {_shortened(name)}{env_suggestion(name)}" for name in unknown]


def _contradictions(settings: Settings, origins: Mapping[str, SettingOrigin], invalid: set[str]) -> Iterator[str]:
    for conflict in conflicts(settings):
        if invalid.isdisjoint(conflict.paths):
            where = dict.fromkeys(str(origins[path]) for path in conflict.paths if origins[path] is not DEFAULT_ORIGIN)
            yield f"{', '.join(where)}: {conflict.sentence}"


def _shortened(name: str) -> str:
    printable = "".join(char if char.isprintable() else "?" for char in masked_url(name))
    return printable if len(printable) <= 80 else f"{printable[:77]}..."
