"""Redis connection settings: one redis.url, overrides per client, and the smaller of two limits."""

from __future__ import annotations

import pytest

from rota.infra.settings_file import parse
from rota.model.errors import InvalidSetting
from rota.model.settings import Settings, redis_for, resolve

LOCAL = "redis://:pw@127.0.0.1:5000/0"


def use(user, text="", local_url=LOCAL):
    return redis_for(resolve(parse(text, "rota.yaml")).settings, user, local_url)


@pytest.mark.parametrize(
    ("user", "pool_size", "op_timeout_s"), [("accounting", 20, 2.0), ("scheduler", 50, 2.0), ("agents", 50, 3.0)]
)
def test_redis_defaults_per_client(user, pool_size, op_timeout_s):
    found = use(user)
    assert (found.pool_size, found.op_timeout_s) == (pool_size, op_timeout_s)
    assert (found.connect_timeout_s, found.pool_wait_s) == (2.0, 5.0)
    assert found.url == LOCAL


@pytest.mark.parametrize(
    ("text", "scheduler_s", "agents_s"),
    [
        ("redis: {connection: {timeout: 500}}", 0.5, 0.5),
        ("redis: {connection: {timeout: 1500ms}}", 1.5, 1.5),
        ("redis: {connection: {timeout: 10000}}", 2.0, 10.0),
        ("scheduler: {store-op-timeout: 100ms}", 0.1, 3.0),
    ],
)
def test_smaller_of_two_timeouts_applies(text, scheduler_s, agents_s):
    assert use("scheduler", text).op_timeout_s == use("accounting", text).op_timeout_s == scheduler_s
    assert use("agents", text).op_timeout_s == agents_s


@pytest.mark.parametrize(
    ("text", "pool_size"),
    [
        ("redis.connection.pool.max-total: 5", 5),
        ("accounting.redis_pool_size: 5", 5),
        ("accounting.redis_pool_size: 90", 50),
    ],
)
def test_smaller_of_two_pool_sizes_applies_to_accounting(text, pool_size):
    assert use("accounting", text).pool_size == pool_size


def test_connection_settings_apply_to_every_client():
    text = "redis: {connection: {connect-timeout: 250, pool: {max-wait-millis: 700, max-total: 9}}}"
    for user in ("accounting", "agents", "scheduler"):
        found = use(user, text)
        assert (found.connect_timeout_s, found.pool_wait_s, found.pool_size) == (0.25, 0.7, 9)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("redis.url: redis://r:1/2", "redis://r:1/2"),
        ("redis.url: redis://r:1/2\naccounting.redis_url: rediss://books/3", "rediss://books/3"),
        (
            "redis.url: redis://u:p%40@r:1/2?protocol=3\naccounting.redis.host: books",
            "redis://u:p%40@books:1/2?protocol=3",
        ),
        ("redis.url: redis://u:p@r:1/2\naccounting.redis.port: 7", "redis://u:p@r:7/2"),
        ("redis.url: redis://u:p@r/2\naccounting.redis.host: books", "redis://u:p@books:6379/2"),
        ("redis.url: rediss://r\naccounting.redis: {host: books, port: 7}", "rediss://books:7"),
        ("redis.url: redis://[::1]:1\naccounting.redis.port: 7", "redis://[::1]:7"),
        ("redis.url: redis://r\naccounting.redis.host: '::1'", "redis://[::1]:6379"),
        ("redis.url: unix://u:p@/run/redis.sock?db=2\naccounting.redis.host: books", "redis://u:p@books:6379?db=2"),
        ("accounting.redis.port: 7", "redis://:pw@127.0.0.1:7/0"),
    ],
)
def test_accounting_overrides_replace_their_url_part_for_accounting_only(text, url):
    assert use("accounting", text).url == url
    base = text.splitlines()[0].partition("redis.url: ")[2] if text.startswith("redis.url") else LOCAL
    assert use("agents", text).url == use("scheduler", text).url == base


def test_accounting_host_or_port_alone_is_sufficient():
    assert use("accounting", "accounting.redis.host: books", local_url=None).url == "redis://books:6379"
    assert use("accounting", "accounting.redis.port: 7", local_url=None).url == "redis://127.0.0.1:7"


@pytest.mark.parametrize("user", ["accounting", "agents", "scheduler"])
def test_missing_redis_is_refused_with_a_remedy(user):
    with pytest.raises(InvalidSetting, match=r"set redis\.url, or use `rota up`"):
        redis_for(Settings(), user)


def test_redis_settings_repr_masks_the_password():
    found = use("agents", "redis.url: redis://u:hunter2@r:1/2")
    assert "hunter2" not in repr(found)
    assert "redis://u:***@r:1/2" in repr(found)
