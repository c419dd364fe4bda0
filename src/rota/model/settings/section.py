"""What every part of the tree is: frozen, closed to unknown fields, and silent about its values."""

from __future__ import annotations

from typing import Any

import msgspec


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings that belong together. A field is a setting (annotated with its kind) or a section below.

    A section may hold passwords and may end up in a log line or a traceback, so its repr shows no value;
    `rota.model.settings.rows` shows them masked.
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}(...)"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return []
