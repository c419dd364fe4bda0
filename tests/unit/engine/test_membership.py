"""Which replicas a replica takes for alive, by what it hears."""

import pytest

from rota.engine.cluster.membership import HEARTBEAT_TIMEOUT_S, NAME_MAX, ClusterMembership


class HandClock:
    def __init__(self):
        self.s = 0.0

    def monotonic(self):
        return self.s


@pytest.fixture
def clock():
    return HandClock()


@pytest.fixture
def members(clock):
    return ClusterMembership(None, "here:1", clock)


def test_who_was_heard_lately_is_present_and_who_fell_silent_is_forgotten(members, clock):
    for number in range(3):
        members.receive_heartbeat(b"there:%d" % number)
    assert members.live_replicas() == ["here:1", "there:0", "there:1", "there:2"]
    clock.s = HEARTBEAT_TIMEOUT_S
    members.receive_heartbeat(b"there:9")
    assert members.live_replicas() == ["here:1", "there:9"]
    assert list(members._last_heartbeat) == ["there:9"], "names of the dead are kept for ever"


@pytest.mark.parametrize("garbage", [b"", b"\xc1\xff", b"a\0b", b"line\nline", b"n" * (NAME_MAX + 1), b"\x91" * 300])
def test_what_cannot_be_a_name_is_no_replica_that_workers_wait_for(members, garbage):
    members.receive_heartbeat(garbage)
    assert members.live_replicas() == ["here:1"]
