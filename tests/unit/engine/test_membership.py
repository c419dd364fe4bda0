"""Which replicas a replica considers live, from their heartbeats."""

import pytest

from rota.engine.cluster.membership import HEARTBEAT_TIMEOUT_S, NAME_MAX, SERIES, ClusterMembership


class ManualClock:
    def __init__(self):
        self.s = 0.0

    def monotonic(self):
        return self.s


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def members(clock):
    return ClusterMembership(None, lambda _owns: None, lambda: None, "here:1", clock)


def test_recent_heartbeats_make_replicas_live_and_silent_replicas_are_forgotten(members, clock):
    for number in range(3):
        members.receive_heartbeat(b"there:%d" % number)
    assert members.live_replicas() == ["here:1", "there:0", "there:1", "there:2"]
    clock.s = HEARTBEAT_TIMEOUT_S
    members.receive_heartbeat(b"there:9")
    assert members.live_replicas() == ["here:1", "there:9"]
    assert list(members._last_heartbeat) == ["there:9"], "expired replicas are never removed"


@pytest.mark.parametrize("garbage", [b"", b"\xc1\xff", b"a\0b", b"line\nline", b"n" * (NAME_MAX + 1), b"\x91" * 300])
def test_malformed_heartbeat_adds_no_replica(members, garbage):
    members.receive_heartbeat(garbage)
    assert members.live_replicas() == ["here:1"]


def test_silent_replica_is_suspected_before_it_is_dead_and_again_when_it_is(clock):
    suspicions = []
    members = ClusterMembership(None, lambda _owns: None, lambda: suspicions.append(clock.s), "here:1", clock)
    members.receive_heartbeat(b"there:1")
    for clock.s in (0.0, 1.0, 2.0, 3.0, 4.0, 5.0):
        members.receive_heartbeat(b"here:1")
        members._refresh()
    assert suspicions == [3.0, 4.0]
    members.receive_heartbeat(b"there:1")
    members._refresh()
    assert suspicions == [3.0, 4.0], "a replica that is back is not suspected"


def test_feature_is_used_only_while_every_live_replica_has_announced_it(members, clock):
    assert members.all_know(SERIES)
    members.receive_heartbeat(b"old:1")
    assert not members.all_know(SERIES)
    members.receive_features(b'{"name": "old:1", "features": ["other"]}')
    assert not members.all_know(SERIES)
    members.receive_features(b'{"name": "old:1", "features": ["other", "series"]}')
    assert members.all_know(SERIES)
    members.receive_features(b'{"name": "new:1", "features": ["series"]}')
    members.receive_heartbeat(b"new:1")
    assert members.all_know(SERIES), "it announces its features before its first heartbeat"


def test_feature_is_used_again_when_the_replica_that_lacks_it_has_left(members, clock):
    members.receive_heartbeat(b"old:1")
    clock.s = HEARTBEAT_TIMEOUT_S
    members._refresh()
    assert members.all_know(SERIES)


@pytest.mark.parametrize("garbage", [b"", b"{}", b"[1]", b"\xff", b'{"name": 3, "features": []}'])
def test_malformed_features_are_ignored(members, garbage):
    members.receive_features(garbage)
    assert members.all_know(SERIES)


def test_features_of_replicas_that_send_no_heartbeat_are_bounded(members):
    for number in range(1000):
        members.receive_features(b'{"name": "ghost:%d", "features": []}' % number)
    assert len(members._features) < 10
