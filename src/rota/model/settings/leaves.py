"""The settings tree as a flat list: every setting with its path, kind, default and environment variables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import TypeVar, get_type_hints

import msgspec

from rota.model.settings.kinds import SettingKind, SettingValue
from rota.model.settings.section import Section
from rota.model.settings.tree import Settings

SectionT = TypeVar("SectionT", bound=Section)


class Leaf(msgspec.Struct, frozen=True):
    """One setting. `path` is in snake case with dots: `redis.scheduler.interval_ms`."""

    path: str
    kind: SettingKind
    default: SettingValue

    @property
    def env_names(self) -> tuple[str, ...]:
        """Its environment variables, the recommended one first."""
        name = "ROTA_" + self.path.replace(".", "_").upper()
        return (self.kind.env, name) if self.kind.env else (name,)


@cache
def leaves() -> Mapping[str, Leaf]:
    """All settings by path, in the order of the tree."""
    return {part.path: part for part in _walk(Settings, "") if isinstance(part, Leaf)}


@cache
def sections() -> Mapping[str, type[Section]]:
    """All sections by path, each before those below it."""
    return dict(part for part in _walk(Settings, "") if isinstance(part, tuple))


def build(section: type[SectionT], values: Mapping[str, SettingValue], prefix: str = "") -> SectionT:
    """The section with `values` by path; settings without a value keep their default."""
    fields: dict[str, object] = {}
    for name, hint in _fields(section).items():
        path = prefix + name
        if isinstance(hint, SettingKind):
            if path in values:
                fields[name] = values[path]
        else:
            fields[name] = build(hint, values, path + ".")
    return section(**fields)


def value_at(settings: Settings, path: str) -> SettingValue:
    found: object = settings
    for name in path.split("."):
        found = getattr(found, name)
    assert not isinstance(found, Section), f"{path} is a section"
    return found  # type: ignore[return-value]


def _walk(section: type[Section], prefix: str) -> Iterator[Leaf | tuple[str, type[Section]]]:
    defaults = section()
    for name, hint in _fields(section).items():
        if isinstance(hint, SettingKind):
            yield Leaf(prefix + name, hint, getattr(defaults, name))
        else:
            yield prefix + name, hint
            yield from _walk(hint, f"{prefix}{name}.")


@cache
def _fields(section: type[Section]) -> Mapping[str, SettingKind | type[Section]]:
    hints = get_type_hints(section, include_extras=True)
    return {name: _kind_or_section(hints[name]) for name in section.__struct_fields__}


def _kind_or_section(hint: object) -> SettingKind | type[Section]:
    for note in getattr(hint, "__metadata__", ()):
        if isinstance(note, SettingKind):
            return note
    assert isinstance(hint, type), f"{hint} has no kind"
    assert issubclass(hint, Section), f"{hint} is not a section"
    return hint
