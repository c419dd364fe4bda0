"""Parsing and formatting of cores, memory and durations."""

from __future__ import annotations

from decimal import Decimal

import pytest

from rota.model.errors import InvalidInput
from rota.model.units import (
    CENTICORES_MAX,
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


@pytest.mark.parametrize(
    ("cores", "centicores"),
    [
        ("0", 0),
        ("0.5", 50),
        ("1", 100),
        ("1.25", 125),
        ("0.29", 29),
        (" 4 ", 400),
        ("1.500", 150),
        (0.29, 29),
        (0.07, 7),
        (1.1, 110),
        (8, 800),
        (-0.0, 0),
        (Decimal("2.5"), 250),
        ("21474836.47", CENTICORES_MAX),
    ],
)
def test_cores_are_parsed_to_exact_hundredths(cores, centicores):
    assert parse_cores(cores) == centicores
    assert parse_cores_limit(cores) == centicores


@pytest.mark.parametrize(
    "cores",
    [
        *("", "-", ".5", "5.", "1e3", "1_0", "0x1", "nan", "inf", "-inf", "1,5", "+1", "--1", "\uff11", "1 0", "four"),
        *(True, float("nan"), float("inf"), Decimal("NaN"), Decimal("sNaN"), Decimal("-Infinity"), -2, "-0.5", -100),
    ],
)
def test_invalid_cores_are_refused(cores):
    with pytest.raises(InvalidInput, match="is not a valid amount of cores: use a number from 0"):
        parse_cores(cores)
    with pytest.raises(InvalidInput, match="is not a valid limit in cores: use a number from 0, or -1"):
        parse_cores_limit(cores)


@pytest.mark.parametrize(
    "cores", ["0.001", "1.999", 0.1 + 0.2, Decimal("0.5" + "0" * 40 + "1"), 1e-300, Decimal("1e-999999")]
)
def test_cores_finer_than_a_hundredth_are_refused_not_rounded(cores):
    with pytest.raises(InvalidInput, match="at most two decimals"):
        parse_cores(cores)


@pytest.mark.parametrize("cores", ["21474836.48", 1e22, pytest.param(10**5000, id="10**5000"), Decimal("1e999999")])
def test_cores_above_the_column_maximum_are_refused(cores):
    with pytest.raises(InvalidInput, match=r"too many: use at most 21474836\.47"):
        parse_cores(cores)


@pytest.mark.parametrize("limit", ["-1", -1, -1.0, "-1.00", Decimal(-1)])
def test_minus_one_is_valid_as_an_unlimited_limit_only(limit):
    assert parse_cores_limit(limit) == UNLIMITED == -1
    with pytest.raises(InvalidInput):
        parse_cores(limit)


@pytest.mark.parametrize(
    ("centicores", "text"), [(0, "0"), (50, "0.5"), (7, "0.07"), (100, "1"), (1000, "10"), (125, "1.25")]
)
def test_cores_are_formatted_as_the_shortest_decimal(centicores, text):
    assert format_cores(centicores) == format_cores_limit(centicores) == text


def test_unlimited_is_formatted_as_minus_one_and_negative_cores_fail_an_assertion():
    assert format_cores_limit(UNLIMITED) == "-1"
    with pytest.raises(AssertionError):
        format_cores(UNLIMITED)
    with pytest.raises(AssertionError):
        format_cores_limit(-100)


@pytest.mark.parametrize(
    ("text", "mebibytes"), [("512MiB", 512), ("4GiB", 4096), ("1.5GiB", 1536), ("2 TiB", 2 * 1024**2), ("0MiB", 0)]
)
def test_memory_is_parsed_to_whole_mebibytes(text, mebibytes):
    assert parse_memory(text) == mebibytes


@pytest.mark.parametrize("text", ["512", "4GB", "0.5MiB", "-1GiB", "GiB", "1e3MiB", "4096TiB", "", "4 G iB"])
def test_invalid_memory_is_refused_with_the_expected_format(text):
    with pytest.raises(InvalidInput, match="use whole mebibytes, such as 512MiB, 4GiB"):
        parse_memory(text)


@pytest.mark.parametrize(
    ("mebibytes", "text"), [(0, "0MiB"), (512, "512MiB"), (1536, "1536MiB"), (4096, "4GiB"), (1024**2, "1TiB")]
)
def test_memory_is_formatted_in_the_largest_unit_without_fraction(mebibytes, text):
    assert format_memory(mebibytes) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("500ms", 0.5),
        ("2s", 2),
        ("2m", 120),
        ("10min", 600),
        ("72h", 259200),
        ("30d", 2592000),
        ("1.5h", 5400),
        ("2 s", 2),
    ],
)
def test_duration_is_parsed_with_its_unit(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["2", "", "s", "-2s", "2 seconds", "1h30m", "1e3s", "inf s", "2S", "2µs"])
def test_invalid_duration_is_refused_with_the_expected_format(text):
    with pytest.raises(InvalidInput, match="use a number with a unit, such as 500ms, 2s, 10min, 72h"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0ms"),
        (0.5, "500ms"),
        (0.0015, "1.5ms"),
        (1, "1s"),
        (90, "90s"),
        (300, "5m"),
        (9000, "150m"),
        (259200, "3d"),
    ],
)
def test_duration_is_formatted_in_the_largest_unit_without_fraction(seconds, text):
    assert format_duration(seconds) == text


def test_long_input_is_truncated_in_the_error():
    with pytest.raises(InvalidInput) as refused:
        parse_duration("9" * 10_000)
    assert len(refused.value.sentence) < 200
