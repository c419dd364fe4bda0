"""Events without a server: stream positions, kinds, filters and the text of SSE streams."""

import asyncio
from uuid import UUID

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rota.engine.events.publisher import EventPublisher
from rota.infra.nats import PublishOutcome, PublishReceipt
from rota.model.access import Actor
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
from rota.model.identity.api_key_format import KeyId
from rota.model.identity.principals import Principal
from rota.model.ids import ShowId
from rota.model.sse import SseParser, format_event
from rota.server.http import sse
from rota.server.http.open_streams import OpenStream
from rota.server.http.routes.events import encode_batch

FILM, OTHER = ShowId(UUID(int=1)), ShowId(UUID(int=2))


def job(number):
    return UUID(int=number)


HYPOTHESIS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@HYPOTHESIS
@given(
    stream=st.integers(0, 2**63).map(lambda number: f"{number:x}"),
    seq=st.integers(0, 2**63 - 1),
    index=st.none() | st.integers(0, 10**9 - 1),
)
def test_stream_position_survives_text(stream, seq, index):
    position = StreamPosition(stream, seq, index)
    assert StreamPosition.parse(str(position)) == position


@pytest.mark.parametrize(
    "text", ["", "x", "12", "zz-1", "1-2-3-4", "1--2", "1-2-", "1-٣", " 1-2", "1-2\n", "1-" + "9" * 20]
)
def test_malformed_stream_position_is_refused(text):
    with pytest.raises(InvalidInput):
        StreamPosition.parse(text)


@HYPOTHESIS
@given(sizes=st.lists(st.integers(0, 5), max_size=6), cut=st.integers(-1, 40))
def test_batch_after_a_cut_has_the_remaining_events_in_order(sizes, cut):
    """A group without jobs is one event."""
    groups, number = [], 0
    for size in sizes:
        groups.append(EventGroup("job.failed", 0, jobs=join_ids(job(n) for n in range(number, number + size))))
        number += size
    whole = [event.id for batch in to_event_batches("a", 1, groups) for event in batch.events()]
    assert whole == [f"a-1-{index}" for index in range(len(whole))]
    left = [batch.after(cut) for batch in to_event_batches("a", 1, groups)]
    assert [event.id for batch in left if batch for event in batch.events()] == whole[cut + 1 :]


def test_job_is_found_at_its_indexes_and_never_across_two_ids():
    straddling = UUID(bytes=job(1).bytes[8:] + job(2).bytes[:8])
    group = EventGroup("job.failed", 0, jobs=join_ids([job(1), job(2), job(1)]))
    assert (group.indexes_of_job(job(1)), group.indexes_of_job(straddling), group.indexes_of_job(job(9))) == (
        [0, 2],
        [],
        [],
    )


def matched_jobs(event_filter, group):
    [batch] = to_event_batches("a", 1, [group])
    found = event_filter.apply(batch)
    return [] if found is None else [event.job for event in found.events()]


def test_filter_passes_only_visible_and_requested_events():
    group = EventGroup("job.failed", 0, FILM, "film", join_ids([job(1), job(2)]))
    workers = EventGroup("worker.lost", 0)
    assert (
        matched_jobs(EventFilter(), group)
        == matched_jobs(EventFilter(shows=frozenset({FILM})), group)
        == [job(1), job(2)]
    )
    assert (
        matched_jobs(EventFilter(shows=frozenset({OTHER})), group)
        == matched_jobs(EventFilter(shows=frozenset()), group)
        == []
    )
    assert matched_jobs(EventFilter(shows=frozenset({FILM})), workers) == []
    assert matched_jobs(EventFilter(shows=frozenset({OTHER}), show="film"), group) == []
    assert (
        matched_jobs(EventFilter(show="other"), group)
        == matched_jobs(EventFilter(kinds=("job.succeeded",)), group)
        == []
    )
    assert matched_jobs(EventFilter(job=job(2)), group) == [job(2)]
    assert matched_jobs(EventFilter(kinds=("job",)), group) == matched_jobs(
        EventFilter(kinds=("worker", "job.failed")), group
    )


def test_reset_event_passes_every_filter():
    reset = EventGroup(RESET_KIND, 0)
    assert matched_jobs(EventFilter(shows=frozenset(), show="x", job=job(1), kinds=("worker",)), reset) == [None]


def test_event_kinds_are_parsed_singly_in_lists_and_as_families():
    assert parse_event_kinds(["job.failed, worker", "", "job.failed"]) == ("job.failed", "worker")
    assert parse_event_kinds(JOB_KINDS) == JOB_KINDS
    assert parse_event_kinds(["subscription.change"]) == ("subscription.change",)
    with pytest.raises(InvalidInput, match=r"did you mean job\.failed"):
        parse_event_kinds(["job.faild"])
    for wrong in ("reset", "job.", "show.X", "sh*w"):
        with pytest.raises(InvalidInput):
            parse_event_kinds([wrong])


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0", exclude_categories=["Cc", "Cs"]), max_size=8)


@HYPOTHESIS
@given(st.lists(st.tuples(st.integers(1), st.sampled_from(JOB_KINDS), TEXTS), max_size=5))
def test_sse_events_survive_text_with_comments_and_other_fields_between(events):
    text = b": a beat\nid: 7\n\n".join(
        [
            b"retry: 5\n\n",
            *(format_event(str(number), kind, msgspec.json.encode(data)) for number, kind, data in events),
        ]
    )
    parser = SseParser()
    parsed = [each for line in text.decode().split("\n") if (each := parser.feed(line)) is not None]
    assert [(each.id, each.kind, msgspec.json.decode(each.data)) for each in parsed] == [
        (str(number), kind, data) for number, kind, data in events
    ]
    assert parser.last_id == (str(events[-1][0]) if events else "")


@HYPOTHESIS
@given(st.lists(st.integers(0, 200).map(lambda thousands: b"x" * 1000 * thousands), max_size=5))
def test_stream_is_cut_into_few_bounded_chunks(texts):
    chunks = list(sse.chunked(texts))
    assert b"".join(chunks) == b"".join(texts)
    assert all(0 < len(chunk) <= sse.CHUNK_BYTES for chunk in chunks)
    assert len(chunks) <= 2 * sum(map(len, texts)) / sse.CHUNK_BYTES + 1


@HYPOTHESIS
@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    show=TEXTS,
    facts=st.dictionaries(TEXTS, TEXTS | st.integers() | st.none()),
    cut=st.integers(-1, 4),
)
def test_batch_encoding_equals_the_events_encoded_one_by_one(sizes, show, facts, cut):
    groups = [
        EventGroup("job.failed", 1_700_000_000_123, FILM, show, join_ids(map(job, range(n))), facts) for n in sizes
    ]
    whole = [left for batch in to_event_batches("ab", 7, groups) if (left := batch.after(cut)) is not None]
    only = [one for each in whole if (one := EventFilter(job=job(1)).apply(each)) is not None]
    for batch in [*whole, *only, EventBatch(StreamPosition("ab", 7), groups[0])]:
        alone = [format_event(event.id, event.kind, msgspec.json.encode(event)) for event in batch.events()]
        assert encode_batch(batch) == b"".join(alone)


async def test_stream_that_was_cancelled_accepts_a_late_end():
    stream = OpenStream(Actor(KeyId("0" * 10), "k", Principal("k")))
    with pytest.raises(asyncio.CancelledError):
        async with stream.cancel_on_end():
            raise asyncio.CancelledError
    stream.end("left")
    assert stream.reason == "left"


class RejectingBus:
    """A NATS connection that rejects every message until the test changes the outcome."""

    def __init__(self):
        self.calls = 0
        self.outcome = PublishOutcome.REJECTED

    async def publish_many(self, messages):
        self.calls += 1
        return [PublishReceipt(self.outcome, reason="no stream") for _ in messages]


async def test_rejected_events_are_sent_once_per_publish_call():
    bus = RejectingBus()
    publisher = EventPublisher(None, bus)
    publisher.emit("agent.started", agent="a")
    for calls in (1, 2, 3):
        with pytest.raises(NatsUnavailable, match="no stream"):
            await publisher.publish()
        assert bus.calls == calls, "one request per publish call"
    bus.outcome = PublishOutcome.STORED
    await publisher.publish()
    assert bus.calls == 4
