"""Tokens and their bitmaps."""

from uuid import UUID

import asyncpg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.model.errors import InvalidInput
from rota.queue.claims import Claim
from rota.queue.tokens import CLAIM_MAX, check_tokens, masks_of, tokens_in

TOKENS = st.sets(st.integers(0, 5 * CLAIM_MAX), max_size=60)


def decode(masks):
    return sorted(token for claim, mask in zip(*masks, strict=True) for token in tokens_in(claim, mask))


@given(TOKENS)
def test_tokens_survive_their_bitmaps(tokens):
    assert decode(masks_of(tokens)) == sorted(tokens)


@given(st.integers(0, 3 * CLAIM_MAX), st.integers(0, 1200))
def test_token_range_has_the_bitmaps_of_its_tokens(first, number):
    tokens = range(first, first + number)
    assert decode(masks_of(tokens)) == list(tokens)
    assert masks_of(tokens)[0] == masks_of(list(tokens))[0]


def test_bitmap_ends_with_its_last_token():
    [claim], [mask] = masks_of([7 * CLAIM_MAX + 2])
    assert (claim, mask) == (7, asyncpg.BitString("001"))


@pytest.mark.parametrize("tokens", [[-1], [2**53], range(5000)])
def test_invalid_tokens_are_refused(tokens):
    with pytest.raises(InvalidInput):
        check_tokens(tokens)


def test_claimed_ranges_skip_cancelled_tokens_and_keep_frames_aligned():
    job, layer = UUID(int=1), UUID(int=2)
    claim = Claim(
        3, 1, 0, 6, (3 * 512 + 1, 3 * 512 + 4), [4, 2], [job] * 2, [layer] * 2, [10, 50], [1, 2], [None, b"x"]
    )
    assert [(claimed.tokens, claimed.frames, claimed.attempt, claimed.payload) for claimed in claim.ranges()] == [
        (range(1536, 1537), range(10, 11), 1, None),
        (range(1538, 1540), range(12, 14), 1, None),
        (range(1541, 1542), range(51, 52), 2, b"x"),
    ]
    assert (claim.frames, claim.tokens) == (4, [1536, 1538, 1539, 1541])
