"""Settings of the blob store for inputs, results and artifacts."""

from __future__ import annotations

from typing import Annotated

from rota.model.settings.kinds import Integer, String
from rota.model.settings.section import Section

_PATH = r"[^\x00-\x1f]+"


class StoreSettings(Section, frozen=True):
    """Storage of values that are too large for a message."""

    directory: Annotated[
        str | None,
        String(
            "Directory for large values, shared by servers and workers; empty: PostgreSQL.",
            pattern=_PATH,
            described="a path",
        ),
    ] = None
    small_bytes: Annotated[int, Integer("Values up to this size are stored in PostgreSQL.", least=1)] = 256 * 1024
    most_bytes: Annotated[int, Integer("Largest value that is stored.", least=1, most=1024**3)] = 16 * 1024 * 1024
