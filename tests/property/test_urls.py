"""Passwords in URLs are never shown, whatever they contain and however badly they are escaped."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.infra.nats import NatsTarget
from rota.infra.postgres import PostgresTarget
from rota.infra.postgres import failures as postgres_failures
from rota.infra.redis import RedisTarget, connect
from rota.infra.redis.failures import address_of
from rota.model.errors import InvalidSetting
from rota.model.settings.masking import masked_url
from rota.model.urls import address, validate_url

CANARY = "hunter2"
# Without & and ;, after which the value of a URL parameter ends.
HOSTILE = st.text(st.sampled_from("/#@:?=%,[]\\ \n1x"), max_size=6)
PASSWORDS = st.tuples(HOSTILE, HOSTILE).map(CANARY.join)
URLS = st.builds(
    lambda shape, password: shape.replace("PASSWORD", password),
    st.sampled_from(
        [
            "SCHEME://rota:PASSWORD@host:5432/db",
            "SCHEME://:PASSWORD@host:5432",
            "SCHEME://localhost:12PASSWORD@host/0",
            "SCHEME://host/db?password=PASSWORD",
            "SCHEME://host/db?sslpassword=PASSWORD&application_name=x@y",
        ]
    ),
    PASSWORDS,
)


def shown_by_postgres(url):
    target = PostgresTarget(url=url)
    return repr(target), str(postgres_failures.on_connect(ConnectionResetError(), target))


def shown_by_redis(url):
    target = RedisTarget(url=url)
    try:
        return repr(target), address_of(connect(target))
    except InvalidSetting as refused:
        return repr(target), str(refused)


def shown_by_nats(url):
    try:
        return (repr(NatsTarget(url=url)),)
    except InvalidSetting as refused:
        return (str(refused),)


@given(URLS)
def test_password_is_not_shown_by_any_user_of_its_url(url):
    for scheme, shown in (
        ("postgresql", shown_by_postgres),
        ("redis", shown_by_redis),
        ("unix", shown_by_redis),
        ("nats", shown_by_nats),
        ("postgresql", lambda url: (address(url),)),
        ("redis", lambda url: (masked_url(url),)),
    ):
        for text in shown(url.replace("SCHEME", scheme)):
            assert CANARY not in text


@given(st.text(), st.sampled_from(["redis://", "redis://u:p@", ""]))
def test_address_of_any_text_is_one_printable_line(text, start):
    assert address(start + text).isprintable()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:secret@db.example:5432/rota?sslmode=require", "db.example:5432/rota"),
        ("postgresql://me@a:1,b:2/rota", "a:1,b:2/rota"),
        ("postgresql:///rota?host=/run/pg", "/run/pg/rota"),
        ("postgresql://%2Frun%2Fpg/rota", "/run/pg/rota"),
        ("postgresql:///rota", "localhost/rota"),
        ("redis://:se%2Fcr%40et@cache:6379/1", "cache:6379/1"),
        ("redis://u:se@cret@cache", "cache"),
        ("unix://:secret@/run/redis.sock?db=1", "/run/redis.sock"),
        ("nats://token@[::1]:4222", "[::1]:4222"),
        ("redis://u:secret%40host:1/0", "***"),
        ("redis://u:12/secret@host:1/0", "***"),
        ("redis://u:secret#1@host:1/0", "***"),
        ("redis://u:secret", "***"),
        ("secret", "***"),
        ("", "***"),
    ],
)
def test_address_has_host_and_database_only(url, shown):
    assert address(url) == shown


@pytest.mark.parametrize("url", ["redis://u:12/secret@host", "redis://u:a?b@host", "redis://u:a#b@host", "h:1", ""])
def test_url_with_ambiguous_password_is_refused_without_repeating_it(url):
    with pytest.raises(ValueError, match="percent-encoded") as refused:
        validate_url(url)
    assert "secret" not in str(refused.value)
