"""Stream, consumer, message and target specifications, without a server."""

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
def test_subject_pattern_matches_as_in_nats(pattern, subject, expected):
    assert subject_matches(pattern, subject) is expected


@pytest.mark.parametrize("subject", ["", ".", "a.", ".a", "a..b", "a b", "a\r\nPUB x 0", "a.*", "a.>", "a\x00b"])
def test_invalid_subject_cannot_be_published_to(subject):
    assert subject_fault(subject)


def test_subject_up_to_the_length_limit_is_accepted():
    assert subject_fault("a" * SUBJECT_MAX) is None
    assert "longer" in subject_fault("é" * SUBJECT_MAX)


def test_stream_for_finds_the_declared_stream_of_a_subject():
    assert stream_for("sys.audit.output.x", [SYS]) is SYS
    assert stream_for("sys.job.submit.late", [SYS]) is None


def test_prefix_is_added_and_removed():
    assert BLUE.stream("SYS") == "BLUE_SYS"
    assert BLUE.subject("sys.job") == "blue.sys.job"
    assert BLUE.bare_subject("blue.sys.job") == "sys.job"
    assert BLUE.bare_stream("BLUE_SYS") == "SYS"


def test_names_without_prefix_are_unchanged():
    assert (BARE.stream("SYS"), BARE.subject("blue.job"), BARE.bare_subject("blue.job")) == (
        "SYS",
        "blue.job",
        "blue.job",
    )


def test_stream_config_uses_the_units_of_the_server():
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


def test_consumer_config_has_its_backoff_and_total_deliveries():
    spec = ConsumerSpec(
        stream="SYS", durable="engine", filter="sys.job.*", backoff_s=(1, 5), max_deliver=3, spare_deliveries=4
    )
    config = consumer_config(spec, BLUE)
    assert config["filter_subject"] == "blue.sys.job.*"
    assert config["backoff"] == [1_000_000_000, 5_000_000_000]
    assert config["ack_wait"] == 1_000_000_000
    assert config["max_deliver"] == 7
    assert [spec.ack_wait_of(delivery) for delivery in (1, 2, 3)] == [1, 5, 5]


def test_consumer_without_delivery_limit_is_never_given_up():
    every_five_seconds_for_a_century = 100 * 365 * 86_400 / 5
    config = consumer_config(ConsumerSpec(stream="SYS", durable="engine", max_deliver=2), BLUE)
    assert config["max_deliver"] > every_five_seconds_for_a_century


def test_stream_that_matches_its_spec_needs_no_update():
    wanted = stream_config(SYS, BARE)
    assert stream_update({**wanted, "compression": "s2"}, wanted) is None


def test_stream_update_changes_declared_fields_and_keeps_operator_settings():
    wanted = stream_config(SYS, BARE)
    assert stream_update({**wanted, "max_age": 1, "compression": "s2"}, wanted) == {**wanted, "compression": "s2"}


@pytest.mark.parametrize(("key", "value"), [("retention", "workqueue"), ("storage", "memory")])
def test_change_of_an_immutable_stream_field_is_refused_with_a_remedy(key, value):
    wanted = stream_config(SYS, BARE)
    with pytest.raises(SetupFailed, match=f"{value}.*nats stream rm SYS"):
        stream_update({**wanted, key: value}, wanted)


def test_dedup_window_longer_than_message_age_is_refused():
    with pytest.raises(InvalidSetting, match="dedup window"):
        StreamSpec(name="SYS", subjects=("sys.>",), max_age_s=60)


@pytest.mark.parametrize(
    ("change", "fault"),
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
def test_message_that_cannot_be_published_has_a_fault(change, fault):
    good = BusMessage(subject="a.b", data=b"x", msg_id="1", headers={"traceparent": "00-1-2-01"})
    assert good.fault(1000) is None
    assert fault in msgspec.structs.replace(good, **change).fault(1000)


def test_message_size_includes_its_headers():
    message = BusMessage(subject="a", data=bytes(100), msg_id="12345", headers={"k": "v"})
    on_the_wire = len(b"NATS/1.0\r\nk: v\r\nNats-Msg-Id: 12345\r\n\r\n") + 100
    assert message.fault(on_the_wire) is None
    assert message.fault(on_the_wire - 1)


def test_nats_target_shows_its_address_and_never_its_credentials():
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


def test_user_without_password_is_a_token():
    assert NatsTarget(url="nats://t0ken@host:1").credentials.token == "t0ken"


@pytest.mark.parametrize("url", ["", "host:4222", "http://host:1", "nats://", "nats://host:port", "nats://a:1,b"])
def test_malformed_nats_url_is_refused(url):
    with pytest.raises(InvalidSetting, match="NATS URL"):
        NatsTarget(url=url)


@pytest.mark.parametrize("url", ["nats://u:s3cret/more@h:1", "nats://u:12/s3cret@h:1", "nats://[s3cret", "s3cret"])
def test_malformed_nats_url_is_not_repeated_in_the_error(url):
    with pytest.raises(InvalidSetting) as refused:
        NatsTarget(url=url)
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("prefix", ["blue", "A_B", "1A", "A.B", "A" * 33])
def test_ambiguous_prefix_is_refused(prefix):
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
def test_jetstream_times_are_parsed_to_the_nanosecond(time, expected):
    assert parse_time_ns(time) == expected
