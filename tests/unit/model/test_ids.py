"""Ids: UUID version 7 as in RFC 9562, and parsing them from text."""

from __future__ import annotations

from uuid import RFC_4122, UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.model.errors import InvalidInput
from rota.model.ids import ENTROPY_BYTES, JobId, LayerId, parse_id, uuid7

times = st.integers(0, 2**48 - 1)
entropies = st.binary(min_size=ENTROPY_BYTES, max_size=ENTROPY_BYTES)


def test_uuid7_matches_the_example_of_the_rfc():
    # Appendix A.6: rand_a 0xCC3, rand_b 0x18C4DC0C0C07398F at 2022-02-22T14:22:22.000-05:00.
    entropy = (0xCC3 << 68 | 0x18C4DC0C0C07398F & (2**62 - 1)).to_bytes(10, "big")
    assert uuid7(1645557742000, entropy) == UUID("017F22E2-79B0-7CC3-98C4-DC0C0C07398F")


@given(times, entropies)
def test_uuid7_fields_are_at_the_positions_of_the_rfc(now_ms, entropy):
    made = uuid7(now_ms, entropy)
    assert made.int >> 80 == now_ms
    assert made.version == 7
    assert made.variant == RFC_4122


@given(times, times, entropies, entropies)
def test_uuid7_and_its_text_sort_by_creation_time(one_ms, other_ms, one, other):
    earlier, later = uuid7(one_ms, one), uuid7(other_ms, other)
    if one_ms < other_ms:
        assert earlier < later
        assert str(earlier) < str(later)


@given(times, entropies, st.integers(0, 79))
def test_every_used_bit_of_entropy_changes_the_id(now_ms, entropy, bit):
    flipped = (int.from_bytes(entropy, "big") ^ 1 << bit).to_bytes(10, "big")
    is_used = bit < 62 or bit >= 68
    assert (uuid7(now_ms, entropy) != uuid7(now_ms, flipped)) == is_used


@pytest.mark.parametrize(("now_ms", "size"), [(-1, 10), (2**48, 10), (0, 9), (0, 16)])
def test_uuid7_with_invalid_time_or_entropy_fails_an_assertion(now_ms, size):
    with pytest.raises(AssertionError):
        uuid7(now_ms, bytes(size))


def test_id_is_parsed_in_either_case():
    made = JobId(uuid7(1_700_000_000_000, bytes(range(10))))
    assert parse_id(JobId, str(made)) == made
    assert parse_id(JobId, str(made).upper()) == made


@pytest.mark.parametrize(
    "text",
    [
        "",
        "job-1",
        "017F22E279B07CC398C4DC0C0C07398F",
        "{017F22E2-79B0-7CC3-98C4-DC0C0C07398F}",
        "urn:uuid:017F22E2-79B0-7CC3-98C4-DC0C0C07398F",
        " 017F22E2-79B0-7CC3-98C4-DC0C0C07398F",
        "017F22E2-79B0-7CC3-98C4-DC0C0C07398F\n",
        "017F22E2-79B0-7CC3-98C4-DC0C0C07398G",
        "\uff1017F22E2-79B0-7CC3-98C4-DC0C0C07398",
        "x" * 10_000,
    ],
)
def test_malformed_id_is_refused_with_an_example(text):
    with pytest.raises(InvalidInput, match="is not a valid layer id: use one like") as refused:
        parse_id(LayerId, text)
    assert len(refused.value.sentence) < 160
