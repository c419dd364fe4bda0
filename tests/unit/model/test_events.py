"""Events without any server: places, kinds, who may see what, and the text of streams."""

import asyncio
from uuid import UUID

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rota.engine.events.publisher import EventPublisher
from rota.infra.nats import PublishOutcome, PublishReceipt
from rota.model.access import Actor
from rota.model.api_key_format import KeyId
from rota.model.errors import InvalidInput, NatsUnavailable
from rota.model.events import (
    JOB_KINDS,
    RESET_KIND,
    EventBatch,
    EventFilter,
    EventGroup,
    StreamPosition,
    join_ids,
    parse_event_kinds,
    to_event_batches,
)
from rota.model.ids import ShowId
from rota.model.sse import SseParser, format_event
from rota.server.http import sse
from rota.server.http.open_streams import OpenStream
from rota.server.http.routes.events import encode_batch

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
    place = StreamPosition(mark, seq, index)
    assert StreamPosition.parse(str(place)) == place


@pytest.mark.parametrize(
    "text", ["", "x", "12", "zz-1", "1-2-3-4", "1--2", "1-2-", "1-٣", " 1-2", "1-2\n", "1-" + "9" * 20]
)
def test_what_is_no_place_is_refused(text):
    with pytest.raises(InvalidInput):
        StreamPosition.parse(text)


@ANYWHERE
@given(sizes=st.lists(st.integers(0, 5), max_size=6), cut=st.integers(-1, 40))
def test_what_is_left_after_any_event_are_the_others_in_their_order(sizes, cut):
    """A group without jobs is one event."""
    groups, number = [], 0
    for size in sizes:
        groups.append(EventGroup("job.failed", 0, jobs=join_ids(job(n) for n in range(number, number + size))))
        number += size
    whole = [event.id for portion in to_event_batches("a", 1, groups) for event in portion.events()]
    assert whole == [f"a-1-{index}" for index in range(len(whole))]
    left = [portion.after(cut) for portion in to_event_batches("a", 1, groups)]
    assert [event.id for portion in left if portion for event in portion.events()] == whole[cut + 1 :]


def test_a_job_is_found_where_it_is_and_never_across_two_ids():
    torn = UUID(bytes=job(1).bytes[8:] + job(2).bytes[:8])
    group = EventGroup("job.failed", 0, jobs=join_ids([job(1), job(2), job(1)]))
    assert (group.indexes_of_job(job(1)), group.indexes_of_job(torn), group.indexes_of_job(job(9))) == ([0, 2], [], [])


def wants(wanted, group):
    [portion] = to_event_batches("a", 1, [group])
    found = wanted.apply(portion)
    return [] if found is None else [event.job for event in found.events()]


def test_only_what_may_be_seen_and_is_asked_for_passes():
    group = EventGroup("job.failed", 0, FILM, "film", join_ids([job(1), job(2)]))
    workers = EventGroup("worker.lost", 0)
    assert wants(EventFilter(), group) == wants(EventFilter(shows=frozenset({FILM})), group) == [job(1), job(2)]
    assert wants(EventFilter(shows=frozenset({OTHER})), group) == wants(EventFilter(shows=frozenset()), group) == []
    assert wants(EventFilter(shows=frozenset({FILM})), workers) == []
    assert wants(EventFilter(shows=frozenset({OTHER}), show="film"), group) == []
    assert wants(EventFilter(show="other"), group) == wants(EventFilter(kinds=("job.succeeded",)), group) == []
    assert wants(EventFilter(job=job(2)), group) == [job(2)]
    assert wants(EventFilter(kinds=("job",)), group) == wants(EventFilter(kinds=("worker", "job.failed")), group)


def test_a_gap_is_told_to_everybody():
    reset = EventGroup(RESET_KIND, 0)
    assert wants(EventFilter(shows=frozenset(), show="x", job=job(1), kinds=("worker",)), reset) == [None]


def test_kinds_are_taken_alone_together_and_as_families():
    assert parse_event_kinds(["job.failed, worker", "", "job.failed"]) == ("job.failed", "worker")
    assert parse_event_kinds(JOB_KINDS) == JOB_KINDS
    assert parse_event_kinds(["subscription.change"]) == ("subscription.change",)
    with pytest.raises(InvalidInput, match=r"did you mean job\.failed"):
        parse_event_kinds(["job.faild"])
    for wrong in ("reset", "job.", "show.X", "sh*w"):
        with pytest.raises(InvalidInput):
            parse_event_kinds([wrong])


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0", exclude_categories=["Cc", "Cs"]), max_size=8)


@ANYWHERE
@given(st.lists(st.tuples(st.integers(1), st.sampled_from(JOB_KINDS), TEXTS), max_size=5))
def test_events_are_read_as_they_were_written_whatever_is_between_them(events):
    text = b": a beat\nid: 7\n\n".join(
        [
            b"retry: 5\n\n",
            *(format_event(str(number), kind, msgspec.json.encode(data)) for number, kind, data in events),
        ]
    )
    reading = SseParser()
    told = [each for line in text.decode().split("\n") if (each := reading.feed(line)) is not None]
    assert [(each.id, each.kind, msgspec.json.decode(each.data)) for each in told] == [
        (str(number), kind, data) for number, kind, data in events
    ]
    assert reading.last_id == (str(events[-1][0]) if events else "")


@ANYWHERE
@given(st.lists(st.integers(0, 200).map(lambda thousands: b"x" * 1000 * thousands), max_size=5))
def test_what_is_sent_is_cut_into_pieces_that_are_small_and_not_many(texts):
    cut = list(sse.chunked(texts))
    assert b"".join(cut) == b"".join(texts)
    assert all(0 < len(piece) <= sse.CHUNK_BYTES for piece in cut)
    assert len(cut) <= 2 * sum(map(len, texts)) / sse.CHUNK_BYTES + 1


@ANYWHERE
@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    show=TEXTS,
    facts=st.dictionaries(TEXTS, TEXTS | st.integers() | st.none()),
    cut=st.integers(-1, 4),
)
def test_events_that_are_written_together_read_as_if_each_was_written_alone(sizes, show, facts, cut):
    groups = [
        EventGroup("job.failed", 1_700_000_000_123, FILM, show, join_ids(map(job, range(n))), facts) for n in sizes
    ]
    whole = [left for portion in to_event_batches("ab", 7, groups) if (left := portion.after(cut)) is not None]
    only = [one for each in whole if (one := EventFilter(job=job(1)).apply(each)) is not None]
    for portion in [*whole, *only, EventBatch(StreamPosition("ab", 7), groups[0])]:
        alone = [format_event(event.id, event.kind, msgspec.json.encode(event)) for event in portion.events()]
        assert encode_batch(portion) == b"".join(alone)


async def test_a_stream_that_was_torn_down_may_still_be_told_to_end():
    stream = OpenStream(Actor(KeyId("0" * 10), "k"))
    with pytest.raises(asyncio.CancelledError):
        async with stream.cancel_on_end():
            raise asyncio.CancelledError
    stream.end("left")
    assert stream.reason == "left"


class Refusing:
    """NATS that takes nothing, until it does."""

    def __init__(self):
        self.asked = 0
        self.outcome = PublishOutcome.REJECTED

    async def publish_many(self, messages):
        self.asked += 1
        return [PublishReceipt(self.outcome, reason="no stream") for _ in messages]


async def test_events_that_are_refused_are_tried_after_a_pause_and_not_again_and_again():
    bus = Refusing()
    teller = EventPublisher(None, bus)
    teller.emit("agent.started", agent="a")
    for asked in (1, 2, 3):
        with pytest.raises(NatsUnavailable, match="no stream"):
            await teller.publish()
        assert bus.asked == asked, "one message for each try"
    bus.outcome = PublishOutcome.STORED
    await teller.publish()
    assert bus.asked == 4
