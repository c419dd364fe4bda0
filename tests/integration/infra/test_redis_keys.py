"""Redis keys: prefix, hash tag, and their use in a Redis Cluster."""

import pytest
from redis.exceptions import ClusterCrossSlotError

from rota.infra.breaker.machine import STEP, _script_args
from rota.infra.redis import RedisKeys, RedisTarget, connect
from rota.model.circuit_breaker import BreakerConfig, CallPermitted, ConsecutiveFailures, ProbesByDuration
from rota.model.errors import InvalidSetting, SetupFailed

RULES = BreakerConfig(counting=ConsecutiveFailures(3), open_ms=1000, probing=ProbesByDuration(1000))


def test_redis_key_consists_of_prefix_name_and_hash_tag():
    assert RedisKeys().breaker_failures("safety:output") == "rota:cb:safety:output:failures"
    assert RedisKeys("myapp:", "ps").breaker_failures("safety") == "myapp:rota:cb:safety:failures{ps}"


def test_declared_key_names_are_recognised():
    assert RedisKeys.is_declared(b"rota:cb:safety:state")
    assert not RedisKeys.is_declared(b"rota:cb:safety:states")
    assert not RedisKeys.is_declared(b"other:rota:cb:safety:state")
    assert not RedisKeys.is_declared(b"rota:cb::state")
    assert not RedisKeys.is_declared(b"\xff")
    tagged = RedisKeys("myapp:", "ps")
    assert tagged.owns(tagged.breaker_state("safety").encode())
    assert not tagged.owns(b"rota:cb:safety:state")


@pytest.mark.parametrize(("prefix", "hash_tag"), [("my{app}:", ""), ("", "{ps}"), ("a b", ""), ("", "p s")])
def test_braces_and_spaces_in_settings_are_refused(prefix, hash_tag):
    with pytest.raises(InvalidSetting, match="leave out braces and spaces"):
        RedisKeys(prefix, hash_tag)


@pytest.mark.parametrize("name", ["", "a{b}", "a b"])
def test_name_that_would_change_the_hash_slot_fails_an_assertion(name):
    with pytest.raises(AssertionError):
        RedisKeys().breaker_state(name)


async def test_cluster_scripts_require_the_hash_tag(private_redis):
    private = await private_redis(cluster=True)
    async with connect(RedisTarget(url=private.url)) as client:

        async def call_script(keys):
            given = {"counter": keys.breaker_failures("safety"), "record": keys.breaker_state("safety")}
            return await STEP(client, event="allow", generation=0, at_ms=0, **given, **_script_args(RULES))

        assert isinstance(await call_script(RedisKeys(hash_tag="ps")), CallPermitted)
        with pytest.raises(SetupFailed, match="set a hash tag") as refused:
            await call_script(RedisKeys())
        assert isinstance(refused.value.__cause__, ClusterCrossSlotError)
