"""Regular expressions of operators: RE2 alone, with a bound on what one may take, so that none can take long."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

from rota.model.errors import InvalidInput

PATTERN_MAX: Final = 1000
PATTERN_MEMORY: Final = 256 * 1024
"""Bytes of the compiled program; RE2 refuses what needs more, such as (a{1,999}){1,999}."""


@lru_cache(maxsize=4096)
def compile_re2(text: str) -> Any:
    """Ready to search with; raises InvalidInput with half a sentence, which whoever knows the line completes."""
    import re2  # type: ignore[import-untyped]  # ships no types

    if len(text) > PATTERN_MAX:
        raise InvalidInput(f"a pattern may have {PATTERN_MAX} marks at most")
    options = re2.Options()
    options.max_mem = PATTERN_MEMORY
    options.log_errors = False
    try:
        return re2.compile(text, options)
    except re2.error as error:
        told = error.args[0] if error.args else b""
        why = told.decode(errors="replace") if isinstance(told, bytes) else str(told)
        raise InvalidInput(f"RE2 does not take the pattern {text[:60]!r}: {why[:80]}") from None
