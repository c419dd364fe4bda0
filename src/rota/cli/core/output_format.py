"""In which form a command answers. Imported by every command, so it imports nothing."""

from __future__ import annotations

from enum import StrEnum


class OutputFormat(StrEnum):
    TEXT = "text"
    WIDE = "wide"
    """Text with all columns, and ids in full."""
    JSON = "json"
    YAML = "yaml"

    @property
    def is_data(self) -> bool:
        """For programs: whole, and in the same words always."""
        return self in (OutputFormat.JSON, OutputFormat.YAML)
