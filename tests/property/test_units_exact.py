"""A6: units are exact, -1 stays -1, and fractions of a core are exact."""

from __future__ import annotations

from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from rota.model.units import (
    CENTICORES_MAX,
    MEBIBYTES_MAX,
    UNLIMITED,
    format_cores,
    format_cores_limit,
    format_duration,
    format_memory,
    parse_cores,
    parse_cores_limit,
    parse_duration,
    parse_memory,
)

amounts = st.integers(0, CENTICORES_MAX)
limits = st.integers(-1, CENTICORES_MAX)


@given(amounts)
def test_cores_survive_text_float_and_decimal(amount):
    text = format_cores(amount)
    assert parse_cores(text) == amount
    assert parse_cores(float(text)) == amount
    assert parse_cores(Decimal(amount) / 100) == amount


@given(limits)
def test_cores_limit_survives_text_and_only_minus_one_is_unlimited(limit):
    text = format_cores_limit(limit)
    assert parse_cores_limit(text) == limit
    assert (text == "-1") == (limit == UNLIMITED)


@given(amounts, amounts)
def test_order_and_equality_of_cores_survive_formatting(one, other):
    assert (Decimal(format_cores(one)) < Decimal(format_cores(other))) == (one < other)
    assert (format_cores(one) == format_cores(other)) == (one == other)


@given(amounts, amounts)
def test_sum_in_hundredths_equals_the_sum_in_cores(one, other):
    assert Decimal(one + other) / 100 == Decimal(format_cores(one)) + Decimal(format_cores(other))


@given(amounts)
def test_formatted_cores_are_the_shortest_decimal(amount):
    text = format_cores(amount)
    assert "." not in text or not text.endswith("0")
    assert len(text.partition(".")[2]) <= 2
    assert not text.startswith("0") or text == "0" or text.startswith("0.")


@given(st.integers(0, MEBIBYTES_MAX))
def test_memory_survives_text(mebibytes):
    assert parse_memory(format_memory(mebibytes)) == mebibytes


@given(st.integers(0, 10**12).map(lambda ms: ms / 1000))
def test_duration_survives_text(seconds):
    assert parse_duration(format_duration(seconds)) == seconds
