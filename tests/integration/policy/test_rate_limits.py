"""Velocity limits in Redis: each job counts once in a sliding window, and a Redis outage throttles."""

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


def question_about(*ids, topic="job.a", show=None):
    return PolicyRequestGroup(PolicyRequest(show=show or "alpha", topic=topic), ids)


@pytest.fixture
def prefix():
    return f"v{uuid4().hex[:8]}:"


@pytest.fixture
def kernel(redis, prefix):
    return kernel_with(redis, prefix)


def kernel_with(redis, prefix, text=TEXT, window="1h"):
    text = text.replace("WINDOW", window)
    return LocalKernel(
        PolicySnapshots(CompiledPolicy(parse(text), snapshot_id(text))), VelocityCounter(redis, RedisKeys(prefix))
    )


async def test_velocity_limit_allows_the_first_jobs_and_throttles_the_rest(kernel):
    some = jobs(5)
    [decision] = await kernel.check([question_about(*some)])
    assert [decision.for_job(job).says for job in some] == [PolicyEffect.ALLOW] * 3 + [PolicyEffect.THROTTLE] * 2
    assert (decision.says, decision.rule, decision.delay_s) == (PolicyEffect.THROTTLE, "slow", 2.0)


async def test_repeated_check_of_a_job_counts_once(kernel):
    some = jobs(4)
    for _ in range(3):
        [decision] = await kernel.check([question_about(*some)])
        assert [decision.for_job(job).says for job in some] == [PolicyEffect.ALLOW] * 3 + [PolicyEffect.THROTTLE]


async def test_questions_of_one_batch_share_a_limit_per_key(kernel):
    decisions = await kernel.check(
        [question_about(*jobs(2)), question_about(*jobs(2), topic="job.b"), question_about(*jobs(2), show="beta")]
    )
    assert [decision.says for decision in decisions] == [PolicyEffect.ALLOW, PolicyEffect.THROTTLE, PolicyEffect.ALLOW]
    assert len(decisions[1].apart) == 1


async def test_deny_limit_takes_precedence_over_a_throttle_limit(kernel):
    some = jobs(4)
    [decision] = await kernel.check([question_about(*some, topic="job.rare")])
    assert [decision.for_job(job).says for job in some] == [PolicyEffect.ALLOW] * 2 + [PolicyEffect.DENY] * 2


async def test_throttled_job_consumes_nothing_of_another_limit(kernel):
    await kernel.check([question_about(*jobs(3))])  # the tenant limit is used up, the topic limit is unused
    [decision] = await kernel.check([question_about(*jobs(2), topic="job.rare")])
    assert (decision.says, decision.apart) == (PolicyEffect.THROTTLE, ())
    [decision] = await kernel.check([question_about(*jobs(2), topic="job.rare", show="beta")])
    assert (decision.says, decision.apart) == (PolicyEffect.ALLOW, ())


async def test_two_kernels_share_their_counts(redis, prefix):
    first, second = kernel_with(redis, prefix), kernel_with(redis, prefix)
    some = [jobs(1)[0] for _ in range(8)]
    answers = await asyncio.gather(*(each.check([question_about(job)]) for job in some for each in (first, second)))
    effects = [decision.says for [decision] in answers]
    assert effects.count(PolicyEffect.ALLOW) == 6  # three jobs, asked by both kernels


async def test_policy_reload_keeps_the_counts(redis, prefix):
    await kernel_with(redis, prefix).check([question_about(*jobs(3))])
    [decision] = await kernel_with(redis, prefix, TEXT + "\n# changed").check([question_about(*jobs(1))])
    assert decision.says is PolicyEffect.THROTTLE


async def test_capacity_returns_after_the_window(redis, prefix):
    kernel = kernel_with(redis, prefix, window="300ms")
    assert (await kernel.check([question_about(*jobs(3))]))[0].says is PolicyEffect.ALLOW
    late = jobs(1)

    async def has_capacity():
        return (await kernel.check([question_about(*late)]))[0].says is PolicyEffect.ALLOW

    await until(has_capacity)
    assert not [key async for key in redis.scan_iter(f"{prefix}*") if await redis.pttl(key) < 0]


async def test_without_redis_counted_jobs_are_throttled_and_others_decided(redis, prefix):
    text = """
rules:
  - {id: slow, decision: throttle, match: {shows: [alpha]}, velocity: {max_requests: 3, window: 1h}}
  - {id: all, decision: allow}
"""
    kernel = LocalKernel(PolicySnapshots(CompiledPolicy(parse(text), snapshot_id(text))))
    counted, other = await kernel.check([question_about(*jobs(1)), question_about(*jobs(1), show="beta")])
    assert (counted.says, counted.reason, counted.rule) == (PolicyEffect.THROTTLE, UNCOUNTED_REASON, "")
    assert other.says is PolicyEffect.ALLOW


async def test_more_than_a_thousand_jobs_are_counted_in_batches(redis, prefix):
    text = """
rules:
  - {id: slow, decision: throttle, velocity: {max_requests: 2500, window: 1h}}
  - {id: all, decision: allow}
"""
    some = jobs(2600)
    [decision] = await kernel_with(redis, prefix, text).check([question_about(*some)])
    assert sum(len(apart.jobs) for apart in decision.apart) == 2500
    assert [decision.for_job(job).says for job in some[2499:2501]] == [PolicyEffect.ALLOW, PolicyEffect.THROTTLE]
