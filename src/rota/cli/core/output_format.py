"""Output formats of a command. Every command imports this module, so it imports nothing heavy."""

from __future__ import annotations

from enum import StrEnum


class OutputFormat(StrEnum):
    TEXT = "text"
    WIDE = "wide"
    """Text with all columns and full ids."""
    JSON = "json"
    YAML = "yaml"

    @property
    def is_data(self) -> bool:
        """For programs: complete and stable."""
        return self in (OutputFormat.JSON, OutputFormat.YAML)
