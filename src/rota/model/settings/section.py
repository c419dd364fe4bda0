"""Base class of all sections: frozen, no unknown fields, no values in its repr."""

from __future__ import annotations

from typing import Any

import msgspec


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Related settings. A field is a setting (annotated with its kind) or a nested section.

    A section may contain passwords and may appear in a log line or a traceback, so its repr shows no values;
    `rota.model.settings.rows` shows them masked.
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}(...)"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return []
