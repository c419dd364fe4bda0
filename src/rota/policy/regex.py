"""Regular expressions of operators: RE2 only, with a memory bound, so that none can be slow."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

from rota.model.errors import InvalidInput

PATTERN_MAX: Final = 1000
PATTERN_MEMORY: Final = 256 * 1024
"""Size limit of the compiled program in bytes; RE2 refuses larger ones, such as (a{1,999}){1,999}."""


@lru_cache(maxsize=4096)
def compile_re2(text: str) -> Any:
    """The compiled pattern. Raises InvalidInput with a phrase; the caller adds the line."""
    import re2  # type: ignore[import-untyped]  # ships no types

    if len(text) > PATTERN_MAX:
        raise InvalidInput(f"a pattern can have at most {PATTERN_MAX} characters")
    options = re2.Options()
    options.max_mem = PATTERN_MEMORY
    options.log_errors = False
    try:
        return re2.compile(text, options)
    except re2.error as error:
        message = error.args[0] if error.args else b""
        why = message.decode(errors="replace") if isinstance(message, bytes) else str(message)
        raise InvalidInput(f"{text[:60]!r} is not a valid RE2 pattern: {why[:80]}") from None
