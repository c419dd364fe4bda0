"""Events without any server: places, kinds, who may see what, and the text of streams."""

import asyncio
from uuid import UUID

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rota.engine.events import Teller
from rota.infra.nats import Outcome, Receipt
from rota.model.access import Actor
from rota.model.errors import InvalidInput, NatsUnavailable
from rota.model.events import (
    JOB_KINDS,
    RESET,
    Group,
    Place,
    Portion,
    Wanted,
    checked_kinds,
    joined,
    portions,
)
from rota.model.ids import ShowId
from rota.model.key_text import KeyId
from rota.model.sse import Reading, written
from rota.server.http import sse
from rota.server.http.events import text_of
from rota.server.http.streams import Stream

FILM, OTHER = ShowId(UUID(int=1)), ShowId(UUID(int=2))


def job(number):
    return UUID(int=number)


ANYWHERE = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@ANYWHERE
@given(
    mark=st.integers(0, 2**63).map(lambda number: f"{number:x}"),
    seq=st.integers(0, 2**63 - 1),
    index=st.none() | st.integers(0, 10**9 - 1),
)
def test_a_place_is_read_as_it_was_written(mark, seq, index):
    place = Place(mark, seq, index)
    assert Place.parse(str(place)) == place


@pytest.mark.parametrize(
    "text", ["", "x", "12", "zz-1", "1-2-3-4", "1--2", "1-2-", "1-٣", " 1-2", "1-2\n", "1-" + "9" * 20]
)
def test_what_is_no_place_is_refused(text):
    with pytest.raises(InvalidInput):
        Place.parse(text)


@ANYWHERE
@given(sizes=st.lists(st.integers(0, 5), max_size=6), cut=st.integers(-1, 40))
def test_what_is_left_after_any_event_are_the_others_in_their_order(sizes, cut):
    """A group without jobs is one event."""
    groups, number = [], 0
    for size in sizes:
        groups.append(Group("job.failed", 0, jobs=joined(job(n) for n in range(number, number + size))))
        number += size
    whole = [event.id for portion in portions("a", 1, groups) for event in portion.events()]
    assert whole == [f"a-1-{index}" for index in range(len(whole))]
    left = [portion.after(cut) for portion in portions("a", 1, groups)]
    assert [event.id for portion in left if portion for event in portion.events()] == whole[cut + 1 :]


def test_a_job_is_found_where_it_is_and_never_across_two_ids():
    torn = UUID(bytes=job(1).bytes[8:] + job(2).bytes[:8])
    group = Group("job.failed", 0, jobs=joined([job(1), job(2), job(1)]))
    assert (group.places_of(job(1)), group.places_of(torn), group.places_of(job(9))) == ([0, 2], [], [])


def wants(wanted, group):
    [portion] = portions("a", 1, [group])
    found = wanted.of(portion)
    return [] if found is None else [event.job for event in found.events()]


def test_only_what_may_be_seen_and_is_asked_for_passes():
    group = Group("job.failed", 0, FILM, "film", joined([job(1), job(2)]))
    workers = Group("worker.lost", 0)
    assert wants(Wanted(), group) == wants(Wanted(shows=frozenset({FILM})), group) == [job(1), job(2)]
    assert wants(Wanted(shows=frozenset({OTHER})), group) == wants(Wanted(shows=frozenset()), group) == []
    assert wants(Wanted(shows=frozenset({FILM})), workers) == []
    assert wants(Wanted(shows=frozenset({OTHER}), show="film"), group) == []
    assert wants(Wanted(show="other"), group) == wants(Wanted(kinds=("job.succeeded",)), group) == []
    assert wants(Wanted(job=job(2)), group) == [job(2)]
    assert wants(Wanted(kinds=("job",)), group) == wants(Wanted(kinds=("worker", "job.failed")), group)


def test_a_gap_is_told_to_everybody():
    reset = Group(RESET, 0)
    assert wants(Wanted(shows=frozenset(), show="x", job=job(1), kinds=("worker",)), reset) == [None]


def test_kinds_are_taken_alone_together_and_as_families():
    assert checked_kinds(["job.failed, worker", "", "job.failed"]) == ("job.failed", "worker")
    assert checked_kinds(JOB_KINDS) == JOB_KINDS
    assert checked_kinds(["subscription.change"]) == ("subscription.change",)
    with pytest.raises(InvalidInput, match=r"did you mean job\.failed"):
        checked_kinds(["job.faild"])
    for wrong in ("reset", "job.", "show.X", "sh*w"):
        with pytest.raises(InvalidInput):
            checked_kinds([wrong])


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0", exclude_categories=["Cc", "Cs"]), max_size=8)


@ANYWHERE
@given(st.lists(st.tuples(st.integers(1), st.sampled_from(JOB_KINDS), TEXTS), max_size=5))
def test_events_are_read_as_they_were_written_whatever_is_between_them(events):
    text = b": a beat\nid: 7\n\n".join(
        [b"retry: 5\n\n", *(written(str(number), kind, msgspec.json.encode(data)) for number, kind, data in events)]
    )
    reading = Reading()
    told = [each for line in text.decode().split("\n") if (each := reading.feed(line)) is not None]
    assert [(each.id, each.kind, msgspec.json.decode(each.data)) for each in told] == [
        (str(number), kind, data) for number, kind, data in events
    ]
    assert reading.last_id == (str(events[-1][0]) if events else "")


@ANYWHERE
@given(st.lists(st.integers(0, 200).map(lambda thousands: b"x" * 1000 * thousands), max_size=5))
def test_what_is_sent_is_cut_into_pieces_that_are_small_and_not_many(texts):
    cut = list(sse.pieces(texts))
    assert b"".join(cut) == b"".join(texts)
    assert all(0 < len(piece) <= sse.PIECE_BYTES for piece in cut)
    assert len(cut) <= 2 * sum(map(len, texts)) / sse.PIECE_BYTES + 1


@ANYWHERE
@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    show=TEXTS,
    facts=st.dictionaries(TEXTS, TEXTS | st.integers() | st.none()),
    cut=st.integers(-1, 4),
)
def test_events_that_are_written_together_read_as_if_each_was_written_alone(sizes, show, facts, cut):
    groups = [Group("job.failed", 1_700_000_000_123, FILM, show, joined(map(job, range(n))), facts) for n in sizes]
    whole = [left for portion in portions("ab", 7, groups) if (left := portion.after(cut)) is not None]
    only = [one for each in whole if (one := Wanted(job=job(1)).of(each)) is not None]
    for portion in [*whole, *only, Portion(Place("ab", 7), groups[0])]:
        alone = [written(event.id, event.kind, msgspec.json.encode(event)) for event in portion.events()]
        assert text_of(portion) == b"".join(alone)


async def test_a_stream_that_was_torn_down_may_still_be_told_to_end():
    stream = Stream(Actor(KeyId("0" * 10), "k"))
    with pytest.raises(asyncio.CancelledError):
        async with stream.lasting():
            raise asyncio.CancelledError
    stream.end("left")
    assert stream.reason == "left"


class Refusing:
    """NATS that takes nothing, until it does."""

    def __init__(self):
        self.asked = 0
        self.outcome = Outcome.REJECTED

    async def publish_many(self, messages):
        self.asked += 1
        return [Receipt(self.outcome, reason="no stream") for _ in messages]


async def test_events_that_are_refused_are_tried_after_a_pause_and_not_again_and_again():
    bus = Refusing()
    teller = Teller(None, bus)
    teller.tell("agent.started", agent="a")
    for asked in (1, 2, 3):
        with pytest.raises(NatsUnavailable, match="no stream"):
            await teller.publish()
        assert bus.asked == asked, "one message for each try"
    bus.outcome = Outcome.STORED
    await teller.publish()
    assert bus.asked == 4
