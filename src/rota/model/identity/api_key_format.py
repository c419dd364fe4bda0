"""Format of an API key: `rota_<id>_<secret>`. Pure; the caller passes the random bytes.

    rota_9x4hq2mzt7_3n8c...            the id is public and identifies the key, the secret is 160 random bits
                                       followed by a checksum of 7 characters over the whole text

* Only `PlainKey.text` exposes the secret: no repr and no error message contains any of it.
* Rota stores `digest` only. A fast hash suffices for a secret that cannot be guessed.
* The checksum is a CRC-32, so a wrong or transposed character is always distinguished from an unknown key. It is not a
  security measure.
"""

from __future__ import annotations

import re
import zlib
from hashlib import sha256
from typing import Final, NewType

import msgspec

from rota.model.errors import Unauthenticated

KeyId = NewType("KeyId", str)

KEY_PREFIX: Final = "rota_"
ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"
"""Base 32 without i, l, o and u, which are easily misread."""
ID_CHARS: Final = 10
SECRET_CHARS: Final = 32
CHECKSUM_CHARS: Final = 7
ENTROPY_BYTES: Final = 27
"""Seven for the id, twenty for the secret."""

_ID = re.compile(rf"[{ALPHABET}]{{{ID_CHARS}}}")
_KEY = re.compile(rf"{KEY_PREFIX}({_ID.pattern})_[{ALPHABET}]{{{SECRET_CHARS + CHECKSUM_CHARS}}}")
_BEARER: Final = "bearer "


class PlainKey(msgspec.Struct, frozen=True):
    """A complete key, as its owner has it."""

    id: KeyId
    text: str

    def __repr__(self) -> str:
        return f"PlainKey({self.id}, ***)"

    def __rich_repr__(self) -> list[tuple[str, str]]:
        return [("id", self.id)]

    @property
    def digest(self) -> bytes:
        """The stored form."""
        return sha256(self.text.encode()).digest()


def new_key(entropy: bytes) -> PlainKey:
    assert len(entropy) == ENTROPY_BYTES, f"a key needs {ENTROPY_BYTES} random bytes"
    name = KeyId(_to_base32(int.from_bytes(entropy[:7], "big"), ID_CHARS))
    text = f"{KEY_PREFIX}{name}_{_to_base32(int.from_bytes(entropy[7:], 'big'), SECRET_CHARS)}"
    return PlainKey(name, text + _checksum(text))


def parse_key(text: str) -> PlainKey:
    """Parse a key and verify its checksum; raises Unauthenticated. Does not check whether the key exists."""
    if not text.startswith(KEY_PREFIX):
        raise Unauthenticated(
            "The value sent as a key is not an API key: use one like rota_<id>_<secret>, from `rota keys create`.",
            reason="malformed",
        )
    found = _KEY.fullmatch(text)
    if found is None or _checksum(text[:-CHECKSUM_CHARS]) != text[-CHECKSUM_CHARS:]:
        raise Unauthenticated(
            "The key is mistyped or incomplete: copy it again, as shown when it was created.", reason="mistyped"
        )
    return PlainKey(KeyId(found[1]), text)


def key_from_headers(authorization: str | None, api_key: str | None) -> str:
    """The key from the request headers `Authorization` and `X-API-Key`."""
    if authorization is not None and authorization[: len(_BEARER)].lower() != _BEARER:
        raise Unauthenticated(
            "The Authorization header contains no key: send `Authorization: Bearer rota_<id>_<secret>`.",
            reason="malformed",
        )
    keys = {authorization[len(_BEARER) :].strip()} if authorization is not None else set[str]()
    keys |= {api_key.strip()} if api_key is not None else set()
    if not keys:
        raise Unauthenticated(
            "This request has no key: send `Authorization: Bearer rota_<id>_<secret>`, from `rota keys create`.",
            reason="missing",
        )
    if len(keys) > 1:
        raise Unauthenticated("Authorization and X-API-Key contain different keys: send only one.", reason="malformed")
    return keys.pop()


def without_secret(text: str) -> str:
    """`text`, or only the key id if it contains a whole key by mistake, so that the secret is not repeated."""
    return text.partition(KEY_PREFIX)[2].partition("_")[0] if KEY_PREFIX in text else text


def _checksum(text: str) -> str:
    return _to_base32(zlib.crc32(text.encode()), CHECKSUM_CHARS)


def _to_base32(number: int, chars: int) -> str:
    """The lowest 5 bits per character; higher bits are dropped."""
    return "".join(ALPHABET[number >> 5 * place & 31] for place in reversed(range(chars)))
