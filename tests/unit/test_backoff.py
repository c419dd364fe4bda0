"""Pauses between tries."""

import pytest

from rota.model.backoff import Backoff


@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
def test_pauses_double_up_to_a_cap_and_are_spread_over_their_upper_half(chance):
    pauses = [Backoff(first_s=1.0, longest_s=8.0).pause_s(streak, chance) for streak in (1, 2, 3, 4, 5, 5000)]
    assert pauses == [whole * (0.5 + chance / 2) for whole in (1, 2, 4, 8, 8, 8)]
