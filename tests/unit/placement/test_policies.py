"""How the workers of a pool are filled, by its placement policy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.placement import PlacementPolicy, requirements_of
from rota.placement.pools_file import parse_pools_file
from rota.placement.scoring import distribute
from tests.support.placement import Fleet, pool, routes

FRAME = requirements_of("t", cores=100)


def fleet(placement):
    return Fleet(routes({"*": ("farm",)}, pool("farm", placement=placement)))


def one_large_and_two_small(placement):
    farm = fleet(placement)
    farm.beat("large", slots=64, cores=6400)
    for name in ("a", "b"):
        farm.beat(name, slots=8, cores=800)
    return farm


def test_fit_fills_machines_of_different_sizes_to_the_same_part():
    farm = one_large_and_two_small(PlacementPolicy.FIT)
    assert farm.place(FRAME, 40) == {"large": 32, "a": 4, "b": 4}


def test_spread_gives_every_machine_the_same_number():
    farm = one_large_and_two_small(PlacementPolicy.SPREAD)
    assert farm.place(FRAME, 18) == {"large": 6, "a": 6, "b": 6}


def test_pack_keeps_machines_empty():
    farm = fleet(PlacementPolicy.PACK)
    for name in ("a", "b", "c"):
        farm.beat(name, slots=8, cores=800)
    [first] = farm.place(FRAME, 3)
    placed = farm.place(FRAME, 6)
    assert placed.pop(first) == 5
    [(second, frames)] = placed.items()
    assert frames == 1
    assert farm.place(FRAME, 7) == {second: 7}


@pytest.mark.parametrize("placement", PlacementPolicy)
@pytest.mark.parametrize("frames", [1, 7, 16, 24])
def test_every_policy_uses_all_room(placement, frames):
    farm = fleet(placement)
    for name in ("a", "b", "c"):
        farm.beat(name, slots=8, cores=800)
    placed = farm.place(FRAME, frames)
    assert sum(placed.values()) == frames
    assert max(placed.values()) <= 8


def test_fit_keeps_frames_without_gpus_off_machines_with_gpus_while_others_have_room():
    farm = fleet(PlacementPolicy.FIT)
    farm.beat("gpu", slots=8, cores=800, gpus=4)
    farm.beat("plain", slots=8, cores=800)
    assert farm.place(FRAME, 6) == {"plain": 6}
    assert farm.place(FRAME, 6) == {"plain": 2, "gpu": 4}
    assert farm.place(requirements_of("t", cores=100, gpus=1), 2) == {"gpu": 2}


def test_fit_counts_the_scarcest_resource():
    """Memory is in use on one, cores on the other; a frame needs both."""
    farm = fleet(PlacementPolicy.FIT)
    for name in ("a", "b"):
        farm.beat(name, slots=32, cores=3200, memory_mb=32_000)
    [hungry] = farm.place(requirements_of("t", cores=100, memory_mb=16_000))
    [other] = {"a", "b"} - {hungry}
    assert farm.place(requirements_of("t", cores=400, memory_mb=100), 2) == {other: 2}


def test_pools_file_sets_the_policy():
    assert parse_pools_file("pools: {farm: {placement: pack}}").pools["farm"].placement is PlacementPolicy.PACK


@given(
    st.lists(
        st.tuples(st.floats(0, 2), st.sampled_from([0.0, 0.1, 0.125, 1.0]), st.integers(0, 9)), min_size=1, max_size=6
    ),
    st.integers(0, 40),
)
def test_distribution_equals_one_frame_after_the_other(workers, n):
    workers.sort()
    scores, steps, room = (list(column) for column in zip(*workers, strict=True))
    expected = [0] * len(workers)
    for _ in range(min(n, sum(room))):
        open_workers = [i for i in range(len(workers)) if expected[i] < room[i]]
        best = min(open_workers, key=lambda i: (scores[i] + expected[i] * steps[i], i))
        expected[best] += 1
    got = distribute(scores, steps, room, n)
    assert sum(got) == sum(expected)
    assert all(0 <= each <= most for each, most in zip(got, room, strict=True))
    highest = [score + step * frames for score, step, frames in zip(scores, steps, expected, strict=True)]
    heights = [score + step * frames for score, step, frames in zip(scores, steps, got, strict=True)]
    assert max(heights) <= max(highest) + 1e-9
