"""The settings as rows for people and programs: path, value, where it came from. Secrets are masked."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from rota.model.settings.kinds import Secret, Url, Value
from rota.model.settings.leaves import leaves, value_at
from rota.model.settings.resolve import LoadedSettings, Origin


class Row(msgspec.Struct, frozen=True):
    """`text` is for people (`5m`), `value` for programs (300.0, in `unit`)."""

    path: str
    text: str
    value: Value
    unit: str
    origin: Origin


def rows(loaded: LoadedSettings) -> Iterator[Row]:
    for path, leaf in leaves().items():
        value, kind = value_at(loaded.settings, path), leaf.kind
        text = kind.show(value)
        may_hold_secret = isinstance(kind, Secret | Url) and value is not None
        yield Row(path, text, text if may_hold_secret else value, kind.unit, loaded.origins[path])
