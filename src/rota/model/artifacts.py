"""Names and glob patterns of artifacts, the files a frame produces. No I/O.

A name is a relative path without `..`, so that a download writes only below the chosen directory. The completion record
of a frame stores an artifact as pointer and name: `pg:9f86...:4 out/beauty.png`.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Final

from rota.model.errors import InvalidInput

NAME_CHARS_MAX: Final = 200
PATTERNS_MAX: Final = 32
ARTIFACTS_MAX: Final = 100
"""Per frame."""


def is_artifact_name(path: str) -> bool:
    """Whether `path` is a relative path that stays below any directory it is resolved in."""
    parts = path.split("/")
    return 0 < len(path) <= NAME_CHARS_MAX and path.isprintable() and not any(part in ("", ".", "..") for part in parts)


def check_artifact_name(name: str) -> str:
    """`name` if it is a valid artifact name; raises InvalidInput otherwise."""
    if not is_artifact_name(name):
        raise InvalidInput(
            f"{name[:64]!r} is not a valid artifact name: use a relative path of 1 to {NAME_CHARS_MAX} printable"
            " characters."
        )
    return name


def check_patterns(patterns: tuple[str, ...], layer: str) -> tuple[str, ...]:
    if len(patterns) > PATTERNS_MAX:
        raise InvalidInput(f"Layer {layer} has {len(patterns)} artifact patterns: use at most {PATTERNS_MAX}.")
    for pattern in patterns:
        if not is_artifact_name(pattern) or any("**" in part and part != "**" for part in PurePosixPath(pattern).parts):
            raise InvalidInput(
                f"{pattern[:64]!r} is not a valid artifact pattern for layer {layer}: use a path or pattern below the"
                " directory of the frame, such as out/*.png."
            )
    return patterns


def format_artifact(pointer: str, name: str) -> str:
    return f"{pointer} {name}"


def parse_artifact(text: str) -> tuple[str, str]:
    """Pointer and name from the stored form."""
    pointer, _, name = text.partition(" ")
    return pointer, name
