"""Heartbeats in parts: each fits into a message, and only a complete one is applied."""

import random
from itertools import permutations
from uuid import UUID

import pytest
from msgspec.structs import replace

from rota.model import heartbeat_parts
from rota.model.errors import InvalidInput
from rota.model.heartbeat_parts import HeartbeatAssembler, encode_heartbeat
from rota.model.protocol import Heartbeat, decode

WORKER = UUID(int=1)


def beat(held, number=1, worker=WORKER, **more):
    return Heartbeat(worker, "w", "farm", number, 8, 800, held=held, **more)


def parts_of(whole, count):
    size = len(whole.held) // count
    return [replace(whole, held=whole.held[n * size : (n + 1) * size], part=n, parts=count) for n in range(count)]


def test_small_heartbeat_is_one_message():
    whole = beat([(5, 3)])
    assert [decode(Heartbeat, data) for data in encode_heartbeat(whole, 1000)] == [whole]


@pytest.mark.parametrize("count", [400, 1000])
@pytest.mark.parametrize("bytes_max", [600, 1000, 4096])
def test_parts_fit_and_list_every_frame(count, bytes_max):
    held = [(2**53 - 3 * n - 1, 1) for n in range(count)]
    messages = encode_heartbeat(beat(held, labels={"a": "b" * 100}), bytes_max)
    assert len(messages) > 1
    assert max(map(len, messages)) <= bytes_max
    parts = [decode(Heartbeat, data) for data in messages]
    assert [(part.part, part.parts) for part in parts] == [(n, len(parts)) for n in range(len(parts))]
    assert held == [each for part in parts for each in part.held]


def test_heartbeat_is_complete_with_its_last_part_in_any_order():
    whole = beat([(2 * n, 1) for n in range(100)])
    parts = parts_of(whole, 4)
    for order in permutations(parts):
        assembler = HeartbeatAssembler()
        *first, last = [assembler.add(part) for part in order]
        assert first == [None] * 3
        assert last == whole


def test_part_received_twice_completes_nothing():
    first, second = parts_of(beat([(2 * n, 1) for n in range(50)]), 2)
    assembler = HeartbeatAssembler()
    assert assembler.add(first) is None
    assert assembler.add(first) is None
    assert assembler.add(second) is not None


def test_incomplete_heartbeat_is_superseded_by_the_next():
    held = [(2 * n, 1) for n in range(50)]
    first = parts_of(beat(held), 2)
    second = parts_of(beat(held, number=2), 2)
    assembler = HeartbeatAssembler()
    assert [assembler.add(part) for part in (first[0], second[1], second[0])] == [None, None, beat(held, number=2)]


def test_parts_of_other_workers_do_not_mix():
    held = [(2 * n, 1) for n in range(50)]
    ours, theirs = parts_of(beat(held), 2), parts_of(beat(held, worker=UUID(int=2)), 2)
    assembler = HeartbeatAssembler()
    assert assembler.add(ours[0]) is None
    assert assembler.add(theirs[1]) is None
    assert assembler.add(ours[1]) == beat(held)


@pytest.mark.parametrize(("part", "parts"), [(0, 0), (-1, 2), (2, 2), (0, -1), (0, 2**40)])
def test_impossible_parts_are_refused(part, parts):
    with pytest.raises(InvalidInput, match="impossible parts"):
        HeartbeatAssembler().add(beat([(1, 1)], part=part, parts=parts))


def test_parts_that_list_too_much_are_dropped(monkeypatch):
    monkeypatch.setattr(heartbeat_parts, "LISTED_RANGES_MAX", 100)
    assembler, endless = HeartbeatAssembler(), beat([(2 * n, 1) for n in range(60)], parts=50)
    for part in range(50):
        assert assembler.add(replace(endless, part=part)) is None
        assert sum(len(each.held) for each in assembler._incomplete[WORKER].values()) <= 180


def test_workers_with_incomplete_heartbeats_are_limited(monkeypatch):
    monkeypatch.setattr(heartbeat_parts, "INCOMPLETE_MAX", 10)
    assembler = HeartbeatAssembler()
    for n in random.Random(1).sample(range(100), 50):
        assembler.add(beat([(1, 1)], worker=UUID(int=n), parts=2))
    assert len(assembler._incomplete) == 10
