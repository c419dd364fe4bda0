"""What a declared stream, consumer, message or target means, without a server."""

import msgspec
import pytest

from rota.infra.nats import BusMessage, ConsumerSpec, NatsTarget, StreamSpec
from rota.infra.nats.jetstream import parse_time_ns
from rota.infra.nats.streams import (
    SUBJECT_MAX,
    NatsNames,
    consumer_config,
    stream_config,
    stream_for,
    stream_update,
    subject_fault,
    subject_matches,
)
from rota.model.errors import InvalidSetting, SetupFailed

BARE, BLUE = NatsNames(""), NatsNames("BLUE")
SYS = StreamSpec(name="SYS", subjects=("sys.job.*", "sys.audit.>"))


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.b.c", False),
        ("a.b", "a", False),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.*", "a.b.c", False),
        ("*.b", "a.b", True),
        ("a.*.c", "a.x.d", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        (">", "a", True),
    ],
)
def test_a_pattern_takes_the_subjects_that_nats_would_give_it(pattern, subject, expected):
    assert subject_matches(pattern, subject) is expected


@pytest.mark.parametrize("subject", ["", ".", "a.", ".a", "a..b", "a b", "a\r\nPUB x 0", "a.*", "a.>", "a\x00b"])
def test_nothing_can_be_published_to_what_is_no_subject(subject):
    assert subject_fault(subject)


def test_a_subject_may_be_as_long_as_the_limit_and_no_longer():
    assert subject_fault("a" * SUBJECT_MAX) is None
    assert "longer" in subject_fault("é" * SUBJECT_MAX)


def test_the_declared_stream_that_takes_a_subject_is_found():
    assert stream_for("sys.audit.output.x", [SYS]) is SYS
    assert stream_for("sys.job.submit.late", [SYS]) is None


def test_a_prefix_is_put_on_and_taken_off():
    assert BLUE.stream("SYS") == "BLUE_SYS"
    assert BLUE.subject("sys.job") == "blue.sys.job"
    assert BLUE.bare_subject("blue.sys.job") == "sys.job"
    assert BLUE.bare_stream("BLUE_SYS") == "SYS"


def test_without_a_prefix_names_stay_as_they_are():
    assert (BARE.stream("SYS"), BARE.subject("blue.job"), BARE.bare_subject("blue.job")) == (
        "SYS",
        "blue.job",
        "blue.job",
    )


def test_a_stream_is_written_in_the_servers_units():
    config = stream_config(
        StreamSpec(name="SYS", subjects=("sys.>",), max_age_s=1.5, dedup_window_s=0.5, max_bytes=9, replicas=3), BLUE
    )
    assert config == {
        "name": "BLUE_SYS",
        "subjects": ["blue.sys.>"],
        "retention": "limits",
        "storage": "file",
        "discard": "old",
        "max_age": 1_500_000_000,
        "max_bytes": 9,
        "max_msgs": -1,
        "duplicate_window": 500_000_000,
        "num_replicas": 3,
    }


def test_a_consumer_tells_the_server_its_waits_and_all_its_deliveries():
    spec = ConsumerSpec(
        stream="SYS", durable="engine", filter="sys.job.*", backoff_s=(1, 5), max_deliver=3, spare_deliveries=4
    )
    config = consumer_config(spec, BLUE)
    assert config["filter_subject"] == "blue.sys.job.*"
    assert config["backoff"] == [1_000_000_000, 5_000_000_000]
    assert config["ack_wait"] == 1_000_000_000
    assert config["max_deliver"] == 7
    assert [spec.ack_wait_of(delivery) for delivery in (1, 2, 3)] == [1, 5, 5]


def test_nats_gives_no_message_up_unless_a_limit_is_declared():
    every_five_seconds_for_a_century = 100 * 365 * 86_400 / 5
    config = consumer_config(ConsumerSpec(stream="SYS", durable="engine", max_deliver=2), BLUE)
    assert config["max_deliver"] > every_five_seconds_for_a_century


def test_a_stream_that_is_as_declared_needs_no_update():
    wanted = stream_config(SYS, BARE)
    assert stream_update({**wanted, "compression": "s2"}, wanted) is None


def test_an_update_changes_what_is_declared_and_keeps_what_an_operator_set():
    wanted = stream_config(SYS, BARE)
    assert stream_update({**wanted, "max_age": 1, "compression": "s2"}, wanted) == {**wanted, "compression": "s2"}


@pytest.mark.parametrize(("key", "value"), [("retention", "workqueue"), ("storage", "memory")])
def test_what_a_stream_keeps_for_life_is_refused_with_the_way_out(key, value):
    wanted = stream_config(SYS, BARE)
    with pytest.raises(SetupFailed, match=f"{value}.*nats stream rm SYS"):
        stream_update({**wanted, key: value}, wanted)


def test_ids_remembered_for_longer_than_messages_are_refused():
    with pytest.raises(InvalidSetting, match="dedup window"):
        StreamSpec(name="SYS", subjects=("sys.>",), max_age_s=60)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"subject": "a.*"}, "wildcards"),
        ({"msg_id": ""}, "message id"),
        ({"msg_id": "a\nb"}, "non-printable"),
        ({"headers": {"bad name": "x"}}, "is not a valid header name"),
        ({"headers": {"Nats-Expected-Stream": "x"}}, "is not a valid header name"),
        ({"headers": {"traceparent": "x\r\ny: z"}}, "non-printable"),
        ({"data": bytes(1000)}, "accepts 1000"),
    ],
)
def test_a_message_that_can_never_be_published_says_why(change, said):
    good = BusMessage(subject="a.b", data=b"x", msg_id="1", headers={"traceparent": "00-1-2-01"})
    assert good.fault(1000) is None
    assert said in msgspec.structs.replace(good, **change).fault(1000)


def test_the_size_of_a_message_counts_its_headers():
    message = BusMessage(subject="a", data=bytes(100), msg_id="12345", headers={"k": "v"})
    on_the_wire = len(b"NATS/1.0\r\nk: v\r\nNats-Msg-Id: 12345\r\n\r\n") + 100
    assert message.fault(on_the_wire) is None
    assert message.fault(on_the_wire - 1)


def test_a_target_shows_where_it_points_and_never_the_credentials():
    from rich.pretty import pretty_repr

    target = NatsTarget(url="nats://rota:s3%40ret@a:4222,nats://[::1]:4223", prefix="BLUE")
    for shown in (
        repr(target),
        str(target),
        pretty_repr(target),
        repr(target.credentials),
        pretty_repr(target.credentials),
    ):
        assert "s3" not in shown
    assert target.address == "a:4222,[::1]:4223"
    assert target.servers == ["nats://a:4222", "nats://[::1]:4223"]
    assert (target.credentials.user, target.credentials.password) == ("rota", "s3@ret")


def test_a_user_without_a_password_is_a_token():
    assert NatsTarget(url="nats://t0ken@host:1").credentials.token == "t0ken"


@pytest.mark.parametrize("url", ["", "host:4222", "http://host:1", "nats://", "nats://host:port", "nats://a:1,b"])
def test_a_url_that_cannot_be_read_is_refused(url):
    with pytest.raises(InvalidSetting, match="NATS URL"):
        NatsTarget(url=url)


@pytest.mark.parametrize("url", ["nats://u:s3cret/more@h:1", "nats://u:12/s3cret@h:1", "nats://[s3cret", "s3cret"])
def test_a_url_that_cannot_be_read_is_not_repeated(url):
    with pytest.raises(InvalidSetting) as refused:
        NatsTarget(url=url)
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("prefix", ["blue", "A_B", "1A", "A.B", "A" * 33])
def test_a_prefix_that_could_be_mistaken_for_another_is_refused(prefix):
    with pytest.raises(InvalidSetting, match="prefix"):
        NatsTarget(url="nats://a:1", prefix=prefix)


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        ("1970-01-01T00:00:01Z", 1_000_000_000),
        ("1970-01-01T00:00:00.5Z", 500_000_000),
        ("2026-01-31T12:00:00.000000001Z", 1_769_860_800_000_000_001),
    ],
)
def test_moments_of_jetstream_are_read_to_the_nanosecond(time, expected):
    assert parse_time_ns(time) == expected
