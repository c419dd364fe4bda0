"""Spreading frames in one step gives each worker what assigning them one by one would, and never more than fits."""

import random

import pytest

from rota.placement.scoring import spread


def one_by_one(scores, capacities, n):
    assigned = [0] * len(scores)
    for _ in range(n):
        free = [i for i in range(len(scores)) if assigned[i] < capacities[i]]
        if not free:
            break
        assigned[min(free, key=lambda i: (scores[i] + assigned[i], i))] += 1
    return assigned


def test_spread_with_one_high_score_assigns_no_more_frames_than_given():
    assert spread([0.05, 7.55, 8.9], [4, 4, 7], 7) == [4, 2, 1]


@pytest.mark.parametrize("digits", [0, 1, 2, 16])
def test_spread_equals_assigning_one_by_one(digits):
    chance = random.Random(digits)
    for _ in range(3000):
        scores = sorted(round(chance.uniform(0, 10), digits) for _ in range(chance.randint(1, 5)))
        capacities = [chance.randint(1, 9) for _ in scores]
        n = chance.randint(1, 30)
        assigned, expected = spread(scores, capacities, n), one_by_one(scores, capacities, n)
        assert sum(assigned) == sum(expected), (scores, capacities, n)
        assert all(count <= capacity for count, capacity in zip(assigned, capacities, strict=True))
        # Either of two equally good workers may get a frame.
        heights = [score + count for score, count in zip(scores, assigned, strict=True)]
        expected_heights = [score + count for score, count in zip(scores, expected, strict=True)]
        assert max(heights) - max(expected_heights) < 1e-6, (scores, capacities, n, assigned, expected)
