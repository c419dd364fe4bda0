"""`python -m bench defaults`: what its jobs ask for, and what is made of the samples."""

import pytest

from bench.contenders.bodies import KINDS
from bench.defaults import race
from bench.defaults.race import BARS, EXPECTED_PER_S, Race, Sizes, named
from bench.defaults.up import cores_of, for_slots
from bench.peer_laps import PeerRace, Shape
from bench.report import Report

SIZES = Sizes(rounds={2: 1, 8: 1}, lap_s=1.0, choose_s=1.0)


def raced(rota_per_s, why_absent=None):
    """A race in which every peer runs 100 jobs a second."""
    entries = [(kind, slots, name) for slots in SIZES.rounds for kind in KINDS for name in EXPECTED_PER_S[kind]]
    per_s = {entry: [100.0] for entry in entries}
    per_s |= {(kind, slots, race.OURS): [rota_per_s] for slots in SIZES.rounds for kind in KINDS}
    chosen = {(kind, slots, name): Shape(1, slots) for kind, slots, name in entries}
    peers = PeerRace(None, race.PEERS)
    peers.absent = why_absent or {}
    return Race(peers, SIZES, per_s, chosen)


@pytest.mark.parametrize(
    ("kind", "slots", "cores"),
    [("async", 2, 0.1), ("sync", 2, 1), ("command", 2, 1), ("sync", 8, 0.25), ("async", 32, 0.06), ("sync", 32, 0.06)],
)
def test_jobs_ask_for_less_than_by_default_only_where_the_slots_could_not_be_busy(kind, slots, cores):
    asked = cores_of(kind, slots, machine=2)
    assert asked == cores
    assert asked * slots <= max(2, slots * cores_of(kind, 1, 1))


def test_worker_has_a_process_for_each_slot():
    assert set(for_slots(8).values()) == {"8"}


@pytest.mark.parametrize(("rota_per_s", "passes"), [(200.0, True), (199.0, False)])
def test_bars_hold_at_two_slots_alone(rota_per_s, passes):
    figures = {figure.name: figure for figure in raced(rota_per_s).figures()}
    assert {name for name, figure in figures.items() if figure.bar is not None} == set(BARS)
    assert figures["sync_vs_celery"].within_bar is passes
    assert figures["sync_vs_celery_at_8_slots"].within_bar
    assert Report(list(figures.values())).within_bars is passes


def test_absent_peer_is_null_and_fails_its_bar():
    figures = {figure.name: figure for figure in raced(1000.0, {"dramatiq": "not installed"}).figures()}
    assert figures["async_vs_dramatiq"].value is None
    assert not figures["async_vs_dramatiq"].within_bar
    assert "dramatiq_sync_per_s" not in figures


def test_celery_is_not_compared_with_coroutine_functions():
    assert "async_vs_celery" not in {figure.name for figure in raced(1.0).figures()}


def test_names_tell_the_slots():
    assert (named("sync_vs_awa", 2), named("sync_vs_awa", 32)) == ("sync_vs_awa", "sync_vs_awa_at_32_slots")
