"""Dealing frames to workers at once gives each what dealing them one by one would, and never more than there are."""

import random

import pytest

from rota.placement.scoring import spread


def one_by_one(scores, rooms, n):
    given = [0] * len(scores)
    for _ in range(n):
        free = [i for i in range(len(scores)) if given[i] < rooms[i]]
        if not free:
            break
        given[min(free, key=lambda i: (scores[i] + given[i], i))] += 1
    return given


def test_a_worker_that_is_higher_than_the_level_of_the_others_gets_nothing_that_is_not_there():
    assert spread([0.05, 7.55, 8.9], [4, 4, 7], 7) == [4, 2, 1]


@pytest.mark.parametrize("digits", [0, 1, 2, 16])
def test_dealt_at_once_is_as_dealt_one_by_one(digits):
    chance = random.Random(digits)
    for _ in range(3000):
        scores = sorted(round(chance.uniform(0, 10), digits) for _ in range(chance.randint(1, 5)))
        rooms = [chance.randint(1, 9) for _ in scores]
        n = chance.randint(1, 30)
        dealt, expected = spread(scores, rooms, n), one_by_one(scores, rooms, n)
        assert sum(dealt) == sum(expected), (scores, rooms, n)
        assert all(given <= room for given, room in zip(dealt, rooms, strict=True))
        # Of workers that are equally good for a frame, either may get it.
        heights = [score + given for score, given in zip(scores, dealt, strict=True)]
        expected_heights = [score + given for score, given in zip(scores, expected, strict=True)]
        assert max(heights) - max(expected_heights) < 1e-6, (scores, rooms, n, dealt, expected)
