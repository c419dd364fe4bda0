"""Velocity limits in Redis: each job once, by a window that slides, and nothing let through while Redis is away."""

import asyncio
from uuid import uuid4

import pytest

from rota.infra.redis import RedisKeys
from rota.model.ids import JobId
from rota.model.policy.decision import PolicyEffect, PolicyRequest, PolicyRequestGroup
from rota.policy.evaluate import CompiledPolicy
from rota.policy.kernel import UNCOUNTED_REASON, LocalKernel
from rota.policy.loader import parse, snapshot_id
from rota.policy.rate_limits import VelocityCounter
from rota.policy.snapshots import PolicySnapshots
from tests.support.waiting import until

TEXT = """
default_decision: allow
rules:
  - {id: slow, decision: throttle, delay: 2s, velocity: {max_requests: 3, window: WINDOW, key: tenant}}
  - {id: free, decision: allow, match: {topics: [job.free]}}
  - {id: many, decision: deny, match: {topics: [job.rare]}, velocity: {max_requests: 2, window: WINDOW, key: topic}}
"""


def jobs(count):
    return tuple(JobId(uuid4()) for _ in range(count))


def about(*ids, topic="job.a", show=None):
    return PolicyRequestGroup(PolicyRequest(show=show or "alpha", topic=topic), ids)


@pytest.fixture
def prefix():
    return f"v{uuid4().hex[:8]}:"


@pytest.fixture
def kernel(redis, prefix):
    return made(redis, prefix)


def made(redis, prefix, text=TEXT, window="1h"):
    text = text.replace("WINDOW", window)
    return LocalKernel(
        PolicySnapshots(CompiledPolicy(parse(text), snapshot_id(text))), VelocityCounter(redis, RedisKeys(prefix))
    )


async def test_a_limit_lets_so_many_through_and_throttles_the_rest(kernel):
    some = jobs(5)
    [word] = await kernel.check([about(*some)])
    assert [word.for_job(job).says for job in some] == [PolicyEffect.ALLOW] * 3 + [PolicyEffect.THROTTLE] * 2
    assert (word.says, word.rule, word.delay_s) == (PolicyEffect.THROTTLE, "slow", 2.0)


async def test_asking_again_counts_nothing(kernel):
    some = jobs(4)
    for _ in range(3):
        [word] = await kernel.check([about(*some)])
        assert [word.for_job(job).says for job in some] == [PolicyEffect.ALLOW] * 3 + [PolicyEffect.THROTTLE]


async def test_questions_of_one_batch_share_a_limit_and_others_have_their_own(kernel):
    words = await kernel.check([about(*jobs(2)), about(*jobs(2), topic="job.b"), about(*jobs(2), show="beta")])
    assert [word.says for word in words] == [PolicyEffect.ALLOW, PolicyEffect.THROTTLE, PolicyEffect.ALLOW]
    assert len(words[1].apart) == 1


async def test_a_denial_by_count_wins_over_a_throttle(kernel):
    some = jobs(4)
    [word] = await kernel.check([about(*some, topic="job.rare")])
    assert [word.for_job(job).says for job in some] == [PolicyEffect.ALLOW] * 2 + [PolicyEffect.DENY] * 2


async def test_a_job_without_a_place_takes_none_of_another_limit(kernel):
    await kernel.check([about(*jobs(3))])  # the tenant has no place left, the topic has both
    [word] = await kernel.check([about(*jobs(2), topic="job.rare")])
    assert (word.says, word.apart) == (PolicyEffect.THROTTLE, ())
    [word] = await kernel.check([about(*jobs(2), topic="job.rare", show="beta")])
    assert (word.says, word.apart) == (PolicyEffect.ALLOW, ())


async def test_two_who_decide_share_their_counts(redis, prefix):
    first, second = made(redis, prefix), made(redis, prefix)
    some = [jobs(1)[0] for _ in range(8)]
    answers = await asyncio.gather(*(each.check([about(job)]) for job in some for each in (first, second)))
    said = [word.says for [word] in answers]
    assert said.count(PolicyEffect.ALLOW) == 6  # three jobs, of which both asked


async def test_reading_the_policy_anew_forgets_no_count(redis, prefix):
    await made(redis, prefix).check([about(*jobs(3))])
    [word] = await made(redis, prefix, TEXT + "\n# changed").check([about(*jobs(1))])
    assert word.says is PolicyEffect.THROTTLE


async def test_places_are_free_again_when_the_window_has_passed(redis, prefix):
    kernel = made(redis, prefix, window="300ms")
    assert (await kernel.check([about(*jobs(3))]))[0].says is PolicyEffect.ALLOW
    late = jobs(1)

    async def has_a_place():
        return (await kernel.check([about(*late)]))[0].says is PolicyEffect.ALLOW

    await until(has_a_place)
    assert not [key async for key in redis.scan_iter(f"{prefix}*") if await redis.pttl(key) < 0]


async def test_without_redis_what_would_be_counted_is_throttled_and_the_rest_decided(redis, prefix):
    text = """
rules:
  - {id: slow, decision: throttle, match: {shows: [alpha]}, velocity: {max_requests: 3, window: 1h}}
  - {id: all, decision: allow}
"""
    kernel = LocalKernel(PolicySnapshots(CompiledPolicy(parse(text), snapshot_id(text))))
    counted, other = await kernel.check([about(*jobs(1)), about(*jobs(1), show="beta")])
    assert (counted.says, counted.reason, counted.rule) == (PolicyEffect.THROTTLE, UNCOUNTED_REASON, "")
    assert other.says is PolicyEffect.ALLOW


async def test_a_thousand_jobs_and_more_are_counted_in_parts(redis, prefix):
    text = """
rules:
  - {id: slow, decision: throttle, velocity: {max_requests: 2500, window: 1h}}
  - {id: all, decision: allow}
"""
    some = jobs(2600)
    [word] = await made(redis, prefix, text).check([about(*some)])
    assert sum(len(apart.jobs) for apart in word.apart) == 2500
    assert [word.for_job(job).says for job in some[2499:2501]] == [PolicyEffect.ALLOW, PolicyEffect.THROTTLE]
