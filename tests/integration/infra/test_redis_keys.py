"""Names of keys: prefix, hash tag, and what a Redis Cluster makes of them."""

import pytest
from redis.exceptions import ClusterCrossSlotError

from rota.infra.breaker.machine import STEP, _script_args
from rota.infra.redis import RedisKeys, RedisTarget, connect
from rota.model.circuit_breaker import BreakerConfig, CallPermitted, ConsecutiveFailures, ProbesByDuration
from rota.model.errors import InvalidSetting, SetupFailed

RULES = BreakerConfig(counting=ConsecutiveFailures(3), open_ms=1000, probing=ProbesByDuration(1000))


def test_a_key_is_prefix_name_and_hash_tag():
    assert RedisKeys().breaker_failures("safety:output") == "rota:cb:safety:output:failures"
    assert RedisKeys("myapp:", "ps").breaker_failures("safety") == "myapp:rota:cb:safety:failures{ps}"


def test_declared_names_are_told_from_strangers():
    assert RedisKeys.is_declared(b"rota:cb:safety:state")
    assert not RedisKeys.is_declared(b"rota:cb:safety:states")
    assert not RedisKeys.is_declared(b"other:rota:cb:safety:state")
    assert not RedisKeys.is_declared(b"rota:cb::state")
    assert not RedisKeys.is_declared(b"\xff")
    tagged = RedisKeys("myapp:", "ps")
    assert tagged.owns(tagged.breaker_state("safety").encode())
    assert not tagged.owns(b"rota:cb:safety:state")


@pytest.mark.parametrize(("prefix", "hash_tag"), [("my{app}:", ""), ("", "{ps}"), ("a b", ""), ("", "p s")])
def test_braces_and_spaces_are_refused_as_settings(prefix, hash_tag):
    with pytest.raises(InvalidSetting, match="leave out braces and spaces"):
        RedisKeys(prefix, hash_tag)


@pytest.mark.parametrize("name", ["", "a{b}", "a b"])
def test_a_name_that_would_move_a_key_to_another_slot_is_a_mistake(name):
    with pytest.raises(AssertionError):
        RedisKeys().breaker_state(name)


async def test_in_a_cluster_scripts_need_the_hash_tag_and_run_with_it(private_redis):
    private = await private_redis(cluster=True)
    async with connect(RedisTarget(url=private.url)) as client:

        async def ask(keys):
            given = {"counter": keys.breaker_failures("safety"), "record": keys.breaker_state("safety")}
            return await STEP(client, event="allow", generation=0, at_ms=0, **given, **_script_args(RULES))

        assert isinstance(await ask(RedisKeys(hash_tag="ps")), CallPermitted)
        with pytest.raises(SetupFailed, match="set a hash tag") as refused:
            await ask(RedisKeys())
        assert isinstance(refused.value.__cause__, ClusterCrossSlotError)
