"""The settings as rows: path, value, origin. Secrets are masked."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from rota.model.settings.kinds import Secret, SettingValue, Url
from rota.model.settings.leaves import leaves, value_at
from rota.model.settings.resolve import LoadedSettings, SettingOrigin
from rota.model.settings.tree import Settings


class SettingRow(msgspec.Struct, frozen=True):
    """`text` is for display (`5m`), `value` for programs (300.0, in `unit`)."""

    path: str
    text: str
    value: SettingValue
    unit: str
    origin: SettingOrigin


def rows(loaded: LoadedSettings) -> Iterator[SettingRow]:
    for path, leaf in leaves().items():
        text = leaf.kind.show(value_at(loaded.settings, path))
        yield SettingRow(path, text, masked_value(loaded.settings, path), leaf.kind.unit, loaded.origins[path])


def masked_value(settings: Settings, path: str) -> SettingValue:
    """A value with possible secrets masked."""
    value, kind = value_at(settings, path), leaves()[path].kind
    may_hold_secret = isinstance(kind, Secret | Url) and value is not None
    return kind.show(value) if may_hold_secret else value
