"""Asking a kernel that is elsewhere: one that answers, is down, slow, flapping or lying; and the breaker all share."""

import asyncio
import time
from contextlib import asynccontextmanager

import grpc
import pytest

from rota.infra.redis import RedisKeys, RedisTarget, connect
from rota.infra.rpc.protobuf import decode, encode
from rota.model.circuit_breaker import BreakerPhase
from rota.model.errors import BreakerOpen, Unavailable
from rota.model.policy.decision import PolicyEffect
from rota.policy.grpc import messages
from rota.policy.grpc.client import CIRCUIT_OPEN, RemoteKernel, RemoteOutputKernel
from tests.support.policy_kernel import ALLOWING, Liar, asking, free_port, question, serving
from tests.support.waiting import until

FULL = """
rules:
  - id: gate
    match: {topics: [job.gate]}
    decision: require_approval
    reason: people look
    approval: {quorum: 2, expires: 1h, approvers: [ann, bob]}
    constraints: {budgets: {max_runtime_ms: 5, max_retries: 0, max_artifact_bytes: 7, max_concurrent_jobs: 8}}
  - id: slow
    match: {topics: [job.slow]}
    decision: throttle
    delay: 1500ms
    remediations: [{id: less, title: Less, summary: Do less, replacement_topic: t, replacement_capability: c,
                    add_labels: {a: b}, remove_labels: [x, y]}]
  - id: boxed
    match: {topics: [job.boxed]}
    decision: allow
    constraints: {sandbox: {isolated: true, hosts: [a, b]}, toolchain: {n: 1}, diff: {f: 0.5}, redaction_level: high}
  - {id: counted, match: {topics: [job.counted]}, decision: throttle, velocity: {max_requests: 2, window: 1h}}
  - {id: rest, match: {topics: [job.counted]}, decision: allow}
"""


def allow(data):
    asked = decode(data, messages.CheckBatchRequest).questions
    return encode(
        messages.CheckBatchReply(
            tuple(messages.PolicyDecisionMessage(messages.DecisionCode.ALLOW, rule_id="liar") for _ in asked)
        )
    )


def unavailable(_data):
    return grpc.StatusCode.UNAVAILABLE


@asynccontextmanager
async def client(settings, redis=None):
    kernel = RemoteKernel(settings, redis)
    try:
        yield kernel
    finally:
        await kernel.close()


@pytest.fixture
async def liar():
    """One that allows everything, until it is told to say something else."""
    says = Liar(allow)
    async with says.serving() as says.port:
        yield says


async def fail(kernel, times):
    for _ in range(times):
        with pytest.raises(Unavailable) as error:
            await kernel.check([question()])
        assert not isinstance(error.value, BreakerOpen)


async def counted(redis):
    return int(await redis.get(RedisKeys().breaker_failures("safety")) or 0)


async def test_every_word_comes_as_it_was_said(tmp_path, redis):
    path = tmp_path / "policy.yaml"
    path.write_text(FULL)
    asked = [question(f"job.{name}", 3) for name in ("gate", "slow", "boxed", "counted", "none")]
    async with serving(path, redis) as process, client(asking(process.calls.port)) as kernel:
        heard = await kernel.check(asked)
        assert heard == await process.kernel.check(asked)
    assert [word.says for word in heard] == [
        PolicyEffect.REQUIRE_APPROVAL, PolicyEffect.THROTTLE, PolicyEffect.ALLOW_WITH_CONSTRAINTS,
        PolicyEffect.THROTTLE, PolicyEffect.DENY,
    ]  # fmt: skip
    assert [heard[3].for_job(job).says for job in asked[3].jobs] == [
        PolicyEffect.ALLOW,
        PolicyEffect.ALLOW,
        PolicyEffect.THROTTLE,
    ]
    assert heard[2].constraints.diff == {"f": 0.5}


async def test_many_questions_are_asked_in_parts(liar):
    async with client(asking(liar.port)) as kernel:
        assert len(await kernel.check([question(f"t{n}") for n in range(1200)])) == 1200
    assert liar.calls == 3


async def test_a_decision_that_is_not_known_denies(liar):
    liar.says = lambda _data: bytes.fromhex("0a06" + "0863" + "1a02" + "6162")  # one word: decision 99, rule "ab"
    async with client(asking(liar.port)) as kernel:
        [word] = await kernel.check([question()])
    assert (word.says, word.rule) == (PolicyEffect.DENY, "ab")


async def test_a_word_without_a_decision_denies(liar):
    liar.says = lambda _data: bytes.fromhex("0a00")
    async with client(asking(liar.port)) as kernel:
        [word] = await kernel.check([question()])
    assert word.says is PolicyEffect.DENY


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\xff" * 30,
        b"\x0a\x05abc",
        bytes.fromhex("0a020801") * 2,
        encode(
            messages.CheckBatchReply(
                (
                    messages.PolicyDecisionMessage(
                        messages.DecisionCode.ALLOW, constraints=messages.ConstraintsMessage(diff_json="{")
                    ),
                )
            )
        ),
        encode(
            messages.CheckBatchReply(
                (
                    messages.PolicyDecisionMessage(
                        messages.DecisionCode.ALLOW, apart=(messages.DecisionOverrideMessage(b"short"),)
                    ),
                )
            )
        ),
    ],
)
async def test_garbage_is_no_answer_and_counts(liar, redis, garbage):
    liar.says = lambda _data: garbage
    async with client(asking(liar.port), redis) as kernel:
        await fail(kernel, 1)
    assert await counted(redis) == 1


@pytest.mark.parametrize(
    "status",
    [
        grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED,
    ],
)  # fmt: skip
async def test_any_other_status_is_no_answer_and_counts(liar, redis, status):
    liar.says = lambda _data: status
    async with client(asking(liar.port), redis) as kernel:
        await fail(kernel, 1)
    assert await counted(redis) == 1


async def test_what_the_kernel_refuses_is_no_word_and_counts_nothing(liar, redis):
    liar.says = lambda _data: grpc.StatusCode.INVALID_ARGUMENT
    async with client(asking(liar.port), redis) as kernel:
        await fail(kernel, 5)
    assert await counted(redis) == 0


async def test_a_kernel_that_is_down_opens_the_breaker_with_the_third_failure(redis):
    async with client(asking(free_port()), redis) as kernel:
        await fail(kernel, 3)
        with pytest.raises(BreakerOpen) as error:
            await kernel.check([question()])
        assert error.value.sentence.startswith(CIRCUIT_OPEN)
        assert error.value.facts["retry_ms"] > 25_000
    assert await counted(redis) == 3


async def test_a_slow_kernel_is_left_after_the_time_limit(liar, redis):
    liar.let_go.clear()
    async with client(asking(liar.port, timeout=0.2), redis) as kernel:
        began = time.monotonic()
        await fail(kernel, 1)
        assert time.monotonic() - began < 5.0
    assert await counted(redis) == 1


async def test_flapping_does_not_open_it(liar, redis):
    async with client(asking(liar.port), redis) as kernel:
        for _ in range(4):
            liar.says = unavailable
            await fail(kernel, 2)
            liar.says = allow
            await kernel.check([question()])
        assert (await kernel.breaker.status()).phase is BreakerPhase.CLOSED


async def test_replicas_share_one_breaker(liar, redis):
    liar.says = unavailable
    async with client(asking(liar.port), redis) as one, client(asking(liar.port), redis) as other:
        await fail(one, 2)
        await fail(other, 1)
        for kernel in (one, other):
            with pytest.raises(BreakerOpen):
                await kernel.check([question()])
    assert liar.calls == 3


async def test_the_time_it_is_open_begins_with_the_last_failure(liar, redis):
    liar.says = unavailable
    async with client(asking(liar.port, circuit_open_for=1.0), redis) as kernel:
        await fail(kernel, 2)
        began = time.monotonic()
        await until(lambda: time.monotonic() - began > 0.5)
        await fail(kernel, 1)
        with pytest.raises(BreakerOpen) as error:
            await kernel.check([question()])
    assert error.value.facts["retry_ms"] > 600


async def opened(liar, *kernels):
    """All of them see it open, and then half-open."""
    liar.says = unavailable
    await fail(kernels[0], 3)
    liar.says = allow

    async def is_over():
        return (await kernels[0].breaker.status()).retry_ms == 0

    await until(is_over)


async def test_no_more_probes_than_allowed_by_all_replicas_together(liar, redis):
    settings = asking(liar.port, circuit_open_for=0.3, timeout=10.0)
    async with client(settings, redis) as one, client(settings, redis) as other:
        await opened(liar, one, other)
        began, liar.calls = liar.calls, 0
        assert began == 3
        liar.let_go.clear()
        asked = [asyncio.create_task(kernel.check([question()])) for kernel in (one, other) * 4]
        done = list(asyncio.as_completed(asked))
        for task in done[:5]:
            with pytest.raises(BreakerOpen):
                await task
        assert liar.calls <= 3
        liar.let_go.set()
        words = [await task for task in done[5:]]
        assert [word.says for [word] in words] == [PolicyEffect.ALLOW] * 3
        assert (await other.breaker.status()).phase is BreakerPhase.CLOSED


async def test_one_failed_probe_opens_it_again(liar, redis):
    async with client(asking(liar.port, circuit_open_for=0.2), redis) as kernel:
        await opened(liar, kernel)
        liar.says = unavailable
        await fail(kernel, 1)
        with pytest.raises(BreakerOpen):
            await kernel.check([question()])


async def test_two_good_probes_close_it(liar, redis):
    async with client(asking(liar.port, circuit_open_for=0.2), redis) as kernel:
        await opened(liar, kernel)
        await kernel.check([question()])
        assert kernel.breaker.phase is BreakerPhase.HALF_OPEN
        await kernel.check([question()])
        assert kernel.breaker.phase is BreakerPhase.CLOSED


async def test_without_redis_each_replica_has_its_own(liar):
    liar.says = unavailable
    dead = connect(RedisTarget(url=f"redis://127.0.0.1:{free_port()}"))
    async with client(asking(liar.port), dead) as one, client(asking(liar.port), dead) as other:
        await fail(one, 3)
        with pytest.raises(BreakerOpen):
            await one.check([question()])
        await fail(other, 1)
    await dead.aclose()


async def test_a_kernel_that_answers_is_asked_while_redis_is_away(liar):
    dead = connect(RedisTarget(url=f"redis://127.0.0.1:{free_port()}"))
    async with client(asking(liar.port), dead) as kernel:
        assert [word.says for word in await kernel.check([question()])] == [PolicyEffect.ALLOW]
    await dead.aclose()


async def test_outputs_have_a_breaker_of_their_own(liar, redis):
    liar.says = unavailable
    outputs = RemoteOutputKernel(asking(liar.port), redis)
    for _ in range(3):
        with pytest.raises(Unavailable):
            await outputs.check_output("{}", b"", 1.0)
    with pytest.raises(BreakerOpen):
        await outputs.check_output("{}", b"", 1.0)
    await outputs.close()
    assert int(await redis.get("rota:cb:safety:output:failures")) == 3
    assert await counted(redis) == 0


async def test_a_call_that_is_cancelled_counts_as_nothing(liar, redis):
    liar.let_go.clear()
    async with client(asking(liar.port), redis) as kernel:
        task = asyncio.create_task(kernel.check([question()]))
        await liar.arrived.acquire()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await counted(redis) == 0


async def test_closing_ends_calls_without_a_word_and_counts_nothing(liar, redis):
    liar.let_go.clear()
    kernel = RemoteKernel(asking(liar.port), redis)
    tasks = [asyncio.create_task(kernel.check([question()])) for _ in range(4)]
    for _ in tasks:
        await liar.arrived.acquire()
    await kernel.close()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(each, Unavailable | asyncio.CancelledError) for each in ended)
    with pytest.raises(Unavailable):
        await kernel.check([question()])
    assert await counted(redis) == 0


async def test_the_policys_word_on_silence_is_remembered(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text(ALLOWING + "input_policy: {fail_mode: open}\n")
    async with serving(path) as process, client(asking(process.calls.port)) as kernel:
        assert kernel.fail_mode is None
        await kernel.check([question()])
        assert kernel.fail_mode == "open"
