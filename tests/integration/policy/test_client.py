"""The client of a remote kernel that answers, is down, slow, flapping or invalid; and the shared circuit breaker."""

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
from tests.support.policy_kernel import ALLOWING, FaultyKernel, client_settings, free_port, question, serving
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
async def fake_kernel():
    """A fake kernel that allows everything unless `says` is replaced."""
    server = FaultyKernel(allow)
    async with server.serving() as server.port:
        yield server


async def fail(kernel, times):
    for _ in range(times):
        with pytest.raises(Unavailable) as error:
            await kernel.check([question()])
        assert not isinstance(error.value, BreakerOpen)


async def counted(redis):
    return int(await redis.get(RedisKeys().breaker_failures("safety")) or 0)


async def test_every_decision_arrives_unchanged(tmp_path, redis):
    path = tmp_path / "policy.yaml"
    path.write_text(FULL)
    asked = [question(f"job.{name}", 3) for name in ("gate", "slow", "boxed", "counted", "none")]
    async with serving(path, redis) as process, client(client_settings(process.calls.port)) as kernel:
        received = await kernel.check(asked)
        assert received == await process.kernel.check(asked)
    assert [decision.says for decision in received] == [
        PolicyEffect.REQUIRE_APPROVAL, PolicyEffect.THROTTLE, PolicyEffect.ALLOW_WITH_CONSTRAINTS,
        PolicyEffect.THROTTLE, PolicyEffect.DENY,
    ]  # fmt: skip
    assert [received[3].for_job(job).says for job in asked[3].jobs] == [
        PolicyEffect.ALLOW,
        PolicyEffect.ALLOW,
        PolicyEffect.THROTTLE,
    ]
    assert received[2].constraints.diff == {"f": 0.5}


async def test_many_questions_are_sent_in_several_batches(fake_kernel):
    async with client(client_settings(fake_kernel.port)) as kernel:
        assert len(await kernel.check([question(f"t{n}") for n in range(1200)])) == 1200
    assert fake_kernel.calls == 3


async def test_unknown_decision_code_denies(fake_kernel):
    fake_kernel.says = lambda _data: bytes.fromhex(
        "0a06" + "0863" + "1a02" + "6162"
    )  # one decision: code 99, rule "ab"
    async with client(client_settings(fake_kernel.port)) as kernel:
        [decision] = await kernel.check([question()])
    assert (decision.says, decision.rule) == (PolicyEffect.DENY, "ab")


async def test_decision_without_a_code_denies(fake_kernel):
    fake_kernel.says = lambda _data: bytes.fromhex("0a00")
    async with client(client_settings(fake_kernel.port)) as kernel:
        [decision] = await kernel.check([question()])
    assert decision.says is PolicyEffect.DENY


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
async def test_undecodable_reply_is_unavailable_and_counts_as_failure(fake_kernel, redis, garbage):
    fake_kernel.says = lambda _data: garbage
    async with client(client_settings(fake_kernel.port), redis) as kernel:
        await fail(kernel, 1)
    assert await counted(redis) == 1


@pytest.mark.parametrize(
    "status",
    [
        grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED,
    ],
)  # fmt: skip
async def test_other_grpc_status_is_unavailable_and_counts_as_failure(fake_kernel, redis, status):
    fake_kernel.says = lambda _data: status
    async with client(client_settings(fake_kernel.port), redis) as kernel:
        await fail(kernel, 1)
    assert await counted(redis) == 1


async def test_invalid_argument_is_unavailable_and_does_not_count_as_failure(fake_kernel, redis):
    fake_kernel.says = lambda _data: grpc.StatusCode.INVALID_ARGUMENT
    async with client(client_settings(fake_kernel.port), redis) as kernel:
        await fail(kernel, 5)
    assert await counted(redis) == 0


async def test_unreachable_kernel_opens_the_breaker_at_the_third_failure(redis):
    async with client(client_settings(free_port()), redis) as kernel:
        await fail(kernel, 3)
        with pytest.raises(BreakerOpen) as error:
            await kernel.check([question()])
        assert error.value.sentence.startswith(CIRCUIT_OPEN)
        assert error.value.facts["retry_ms"] > 25_000
    assert await counted(redis) == 3


async def test_slow_kernel_is_abandoned_after_the_timeout(fake_kernel, redis):
    fake_kernel.let_go.clear()
    async with client(client_settings(fake_kernel.port, timeout=0.2), redis) as kernel:
        began = time.monotonic()
        await fail(kernel, 1)
        assert time.monotonic() - began < 5.0
    assert await counted(redis) == 1


async def test_flapping_kernel_does_not_open_the_breaker(fake_kernel, redis):
    async with client(client_settings(fake_kernel.port), redis) as kernel:
        for _ in range(4):
            fake_kernel.says = unavailable
            await fail(kernel, 2)
            fake_kernel.says = allow
            await kernel.check([question()])
        assert (await kernel.breaker.status()).phase is BreakerPhase.CLOSED


async def test_replicas_share_one_breaker(fake_kernel, redis):
    fake_kernel.says = unavailable
    async with (
        client(client_settings(fake_kernel.port), redis) as one,
        client(client_settings(fake_kernel.port), redis) as other,
    ):
        await fail(one, 2)
        await fail(other, 1)
        for kernel in (one, other):
            with pytest.raises(BreakerOpen):
                await kernel.check([question()])
    assert fake_kernel.calls == 3


async def test_open_period_starts_at_the_last_failure(fake_kernel, redis):
    fake_kernel.says = unavailable
    async with client(client_settings(fake_kernel.port, circuit_open_for=1.0), redis) as kernel:
        await fail(kernel, 2)
        began = time.monotonic()
        await until(lambda: time.monotonic() - began > 0.5)
        await fail(kernel, 1)
        with pytest.raises(BreakerOpen) as error:
            await kernel.check([question()])
    assert error.value.facts["retry_ms"] > 600


async def open_then_half_open(fake_kernel, *kernels):
    """Open the breaker and wait until it may probe."""
    fake_kernel.says = unavailable
    await fail(kernels[0], 3)
    fake_kernel.says = allow

    async def is_over():
        return (await kernels[0].breaker.status()).retry_ms == 0

    await until(is_over)


async def test_half_open_breaker_limits_probes_across_replicas(fake_kernel, redis):
    settings = client_settings(fake_kernel.port, circuit_open_for=0.3, timeout=10.0)
    async with client(settings, redis) as one, client(settings, redis) as other:
        await open_then_half_open(fake_kernel, one, other)
        began, fake_kernel.calls = fake_kernel.calls, 0
        assert began == 3
        fake_kernel.let_go.clear()
        asked = [asyncio.create_task(kernel.check([question()])) for kernel in (one, other) * 4]
        done = list(asyncio.as_completed(asked))
        for task in done[:5]:
            with pytest.raises(BreakerOpen):
                await task
        assert fake_kernel.calls <= 3
        fake_kernel.let_go.set()
        decisions = [await task for task in done[5:]]
        assert [decision.says for [decision] in decisions] == [PolicyEffect.ALLOW] * 3
        assert (await other.breaker.status()).phase is BreakerPhase.CLOSED


async def test_one_failed_probe_reopens_the_breaker(fake_kernel, redis):
    async with client(client_settings(fake_kernel.port, circuit_open_for=0.2), redis) as kernel:
        await open_then_half_open(fake_kernel, kernel)
        fake_kernel.says = unavailable
        await fail(kernel, 1)
        with pytest.raises(BreakerOpen):
            await kernel.check([question()])


async def test_two_successful_probes_close_the_breaker(fake_kernel, redis):
    async with client(client_settings(fake_kernel.port, circuit_open_for=0.2), redis) as kernel:
        await open_then_half_open(fake_kernel, kernel)
        await kernel.check([question()])
        assert kernel.breaker.phase is BreakerPhase.HALF_OPEN
        await kernel.check([question()])
        assert kernel.breaker.phase is BreakerPhase.CLOSED


async def test_without_redis_each_replica_has_its_own_breaker(fake_kernel):
    fake_kernel.says = unavailable
    dead = connect(RedisTarget(url=f"redis://127.0.0.1:{free_port()}"))
    async with (
        client(client_settings(fake_kernel.port), dead) as one,
        client(client_settings(fake_kernel.port), dead) as other,
    ):
        await fail(one, 3)
        with pytest.raises(BreakerOpen):
            await one.check([question()])
        await fail(other, 1)
    await dead.aclose()


async def test_reachable_kernel_is_asked_while_redis_is_unavailable(fake_kernel):
    dead = connect(RedisTarget(url=f"redis://127.0.0.1:{free_port()}"))
    async with client(client_settings(fake_kernel.port), dead) as kernel:
        assert [decision.says for decision in await kernel.check([question()])] == [PolicyEffect.ALLOW]
    await dead.aclose()


async def test_output_checks_have_their_own_breaker(fake_kernel, redis):
    fake_kernel.says = unavailable
    outputs = RemoteOutputKernel(client_settings(fake_kernel.port), redis)
    for _ in range(3):
        with pytest.raises(Unavailable):
            await outputs.check_output("{}", b"", 1.0)
    with pytest.raises(BreakerOpen):
        await outputs.check_output("{}", b"", 1.0)
    await outputs.close()
    assert int(await redis.get("rota:cb:safety:output:failures")) == 3
    assert await counted(redis) == 0


async def test_cancelled_call_does_not_count_as_failure(fake_kernel, redis):
    fake_kernel.let_go.clear()
    async with client(client_settings(fake_kernel.port), redis) as kernel:
        task = asyncio.create_task(kernel.check([question()]))
        await fake_kernel.arrived.acquire()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await counted(redis) == 0


async def test_close_ends_pending_calls_without_counting_failures(fake_kernel, redis):
    fake_kernel.let_go.clear()
    kernel = RemoteKernel(client_settings(fake_kernel.port), redis)
    tasks = [asyncio.create_task(kernel.check([question()])) for _ in range(4)]
    for _ in tasks:
        await fake_kernel.arrived.acquire()
    await kernel.close()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(each, Unavailable | asyncio.CancelledError) for each in ended)
    with pytest.raises(Unavailable):
        await kernel.check([question()])
    assert await counted(redis) == 0


async def test_fail_mode_of_the_policy_is_remembered(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text(ALLOWING + "input_policy: {fail_mode: open}\n")
    async with serving(path) as process, client(client_settings(process.calls.port)) as kernel:
        assert kernel.fail_mode is None
        await kernel.check([question()])
        assert kernel.fail_mode == "open"
