"""Tokens of claimed frames, and the bitmaps that encode them. No I/O.

A claim hands out up to `CLAIM_MAX` consecutive positions of a lane under one id. A token is the claim id times
`CLAIM_MAX` plus the offset in the claim: consecutive for frames claimed together, below 2^53, and never reused, since
claim ids are not. A frame that is given back and claimed again gets another token, so a booking, a tombstone or a late
result of the old one cannot apply to the new one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import asyncpg
import msgspec

from rota.model.errors import InvalidInput

CLAIM_MAX: Final = 512
CLAIM_ID_STEP: Final = 8
"""A claim id is a number that is used once, times this, plus the slot of the ring that the claim is in."""
TOKEN_END: Final = 2**53
BATCH_MAX: Final = 4096
"""Maximum number of frames that one call may claim or end."""
_BYTES: Final = CLAIM_MAX // 8

ClaimMasks = tuple[list[int], list[asyncpg.BitString]]


class EndResult(msgspec.Struct, frozen=True):
    """The result of ending frames: this call ended every token that is not `refused`."""

    asked: int
    refused: frozenset[int] = frozenset()
    """Tokens that had ended before, were given back or never claimed: this call did not change them."""

    @property
    def accepted(self) -> int:
        return self.asked - len(self.refused)


def masks_of(tokens: Iterable[int]) -> ClaimMasks:
    """Claim ids with one bitmap each. A range costs one step per claim, not per token."""
    bits: dict[int, int] = {}
    for first, last in _token_ranges(tokens):
        claim, offset = divmod(first, CLAIM_MAX)
        bits[claim] = bits.get(claim, 0) | ((1 << last - first + 1) - 1) << CLAIM_MAX - offset - 1 - (last - first)
    return list(bits), [_bitmap(mask) for mask in bits.values()]


def no_claim_between(earlier: int, later: int) -> bool:
    """Whether no token between these two can belong to another claim than theirs."""
    return earlier < later and later // CLAIM_MAX // CLAIM_ID_STEP - earlier // CLAIM_MAX // CLAIM_ID_STEP <= 1


def tokens_in(claim: int, mask: asyncpg.BitString) -> list[int]:
    """The tokens whose bits are set."""
    number = int.from_bytes(mask.bytes, "big") >> -len(mask) % 8
    length = len(mask)
    return [claim * CLAIM_MAX + at for at in range(length) if number >> length - 1 - at & 1]


def check_tokens(tokens: Iterable[int]) -> list[int] | range:
    """The distinct tokens, sorted; rejects values that cannot be tokens."""
    if isinstance(tokens, range) and tokens.step == 1:
        found: list[int] | range = tokens
    else:
        found = sorted(set(tokens))
    if len(found) > BATCH_MAX:
        raise InvalidInput(f"{len(found)} frames are too many for one call: end at most {BATCH_MAX} at a time.")
    if found and not (found[0] >= 0 and found[-1] < TOKEN_END):
        raise InvalidInput("A token is a whole number from 0 to 2^53 - 1: take tokens from the claim of the frames.")
    return found


def _token_ranges(tokens: Iterable[int]) -> Iterable[tuple[int, int]]:
    """First and last of consecutive tokens of one claim.

    Not `to_spans`: a range is cut at claims, and single tokens are cheaper to set one by one than to group first.
    """
    if isinstance(tokens, range):
        for first in range(tokens.start - tokens.start % CLAIM_MAX, tokens.stop if tokens else 0, CLAIM_MAX):
            yield max(first, tokens.start), min(first + CLAIM_MAX, tokens.stop) - 1
    else:
        for token in tokens:
            yield token, token


def _bitmap(mask: int) -> asyncpg.BitString:
    """Without trailing zeros: PostgreSQL knows the length of the claim."""
    unused = (mask & -mask).bit_length() - 1
    return asyncpg.BitString.frombytes(mask.to_bytes(_BYTES, "big")[: _BYTES - unused // 8], CLAIM_MAX - unused)
