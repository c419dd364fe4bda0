"""The one place where names of Redis keys are made.

A key is `prefix` + name + `{hash_tag}`: with a hash tag all keys lie in one slot of a Redis Cluster, without one a
script of several keys fails there with CROSSSLOT. Both are empty by default, and then operators find the plain names.

Every name is declared in `PATTERNS`, with `{word}` for what varies; the `-- key` lines of Lua files use the same text
(a test compares them), and `Keys.owns` tells our keys from strangers.
"""

from __future__ import annotations

import re
from typing import Final

from rota.model.errors import InvalidSetting

BREAKER_FAILURES: Final = "rota:cb:{name}:failures"
BREAKER_STATE: Final = "rota:cb:{name}:state"

PATTERNS: Final = (BREAKER_FAILURES, BREAKER_STATE)

_WORD = re.compile(r"[^{}\s]+")


class Keys:
    """Names of keys for one installation."""

    def __init__(self, prefix: str = "", hash_tag: str = "") -> None:
        for setting, value in (("prefix", prefix), ("hash-tag", hash_tag)):
            if value and not _WORD.fullmatch(value):
                raise InvalidSetting(
                    f"The {setting} of Redis keys is {value!r}: leave out braces and spaces, Rota adds the braces."
                )
        self.prefix = prefix
        self._tag = f"{{{hash_tag}}}" if hash_tag else ""
        self._owned = [self._matcher(pattern) for pattern in PATTERNS]

    def breaker_failures(self, name: str) -> str:
        return self._key(BREAKER_FAILURES, name=name)

    def breaker_state(self, name: str) -> str:
        return self._key(BREAKER_STATE, name=name)

    def owns(self, key: bytes) -> bool:
        """Whether `key` is one of the names declared here, under this prefix and hash tag."""
        text = key.decode("utf-8", "replace")
        return any(matcher.fullmatch(text) for matcher in self._owned)

    @staticmethod
    def owned(key: bytes) -> bool:
        """Whether `key` is declared here, with neither prefix nor hash tag."""
        return _PLAIN.owns(key)

    def _key(self, pattern: str, **words: str) -> str:
        for word, value in words.items():
            # A brace would open another hash tag before ours and scatter the keys over slots.
            assert _WORD.fullmatch(value), f"{word} of {pattern} is {value!r}"
        return f"{self.prefix}{pattern.format(**words)}{self._tag}"

    def _matcher(self, pattern: str) -> re.Pattern[str]:
        varying = re.sub(r"\\\{\w+\\\}", lambda _: _WORD.pattern, re.escape(pattern))
        return re.compile(re.escape(self.prefix) + varying + re.escape(self._tag))


_PLAIN: Final = Keys()
