"""Client of a remote safety kernel, over gRPC.

- A call yields a reply within `safety.timeout` or raises `Unavailable`: no connection, timeout, malformed bytes, a
  wrong number of decisions, or a defect of the kernel. An unknown decision denies. No reply can allow by accident.
- A circuit breaker shared by all replicas stops calls to a failing kernel and probes it with a few
  (`safety.circuit_*`); while it is open, calls raise `BreakerOpen`. Without Redis each replica has its own breaker
  (ADR 6).
- A cancelled call counts neither as success nor as failure. After `close` nothing is sent or counted.
- A recovered kernel is reached within a second: gRPC's reconnect back-off is kept short.

If the process dies in a call, the kernel may have counted the jobs against their velocity limits; it counts each job
once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc  # type: ignore[import-untyped]  # ships no types
import structlog
from redis.asyncio import Redis

from rota.infra import failpoints
from rota.infra.breaker import Breaker
from rota.infra.clock import Clock, SystemClock
from rota.infra.postgres import Database
from rota.infra.redis import RedisKeys
from rota.infra.rpc.auth import bearer_interceptors
from rota.infra.rpc.protobuf import MessageT, ProtobufMessage, decode, encode
from rota.infra.service import Service
from rota.infra.telemetry import metrics
from rota.model.circuit_breaker import BreakerConfig, ConsecutiveFailures, ProbesByCount
from rota.model.errors import BreakerOpen, InvalidInput, InvalidSetting, RotaError, Unavailable
from rota.model.policy.decision import PolicyDecision, PolicyEffect, PolicyRequest, PolicyRequestGroup
from rota.model.settings import Settings
from rota.policy.evaluate import RuleResult, RuleStatus
from rota.policy.grpc import messages
from rota.policy.grpc.request_cache import KernelClientCodec
from rota.policy.kernel import PolicyExplanation
from rota.policy.snapshots import PolicySnapshot

log = structlog.get_logger(__name__)
T = TypeVar("T")

INPUT_BREAKER: Final = "safety"
OUTPUT_BREAKER: Final = "safety:output"
"""Breaker names, for requests about jobs and about outputs."""
CIRCUIT_OPEN: Final = "safety kernel circuit open"
CHECK_VERSION: Final = "check that its version is that of this server."
QUESTIONS_MAX: Final = 512
"""Per call."""
LOST_AFTER_S: Final = 5.0
REPLY_BYTES_MAX: Final = 16 * 1024 * 1024
CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", REPLY_BYTES_MAX),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
)

LATENCY = metrics.histogram("rota_policy_call_seconds", "Calls to the safety kernel.", labels=("method",))
FAILED = metrics.counter("rota_policy_call_failures", "Calls to the safety kernel that failed.", labels=("why",))


class KernelRejectedRequest(Unavailable):
    """The kernel is healthy and rejects this request; not a failure for the breaker."""


class KernelChannel:
    """One connection to the kernel, opened by the first call."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._channel: Any = None
        self.is_closed = False

    async def call(self, method: str, request: ProtobufMessage, reply: type[MessageT], timeout_s: float) -> MessageT:
        """Raises InvalidInput if the kernel rejects the request, Unavailable for any other failure."""
        if self.is_closed:
            raise Unavailable("The safety kernel was not called: this process is shutting down.")
        with LATENCY.labels(method.rpartition("/")[2]).time():
            data = await self._unary_call(method, encode(request), timeout_s)
        failpoints.after_send("policy.call")
        try:
            return decode(data, reply)
        except InvalidInput as error:
            raise _call_failed("garbage", f"The safety kernel sent a malformed reply: {CHECK_VERSION}") from error

    async def _unary_call(self, method: str, data: bytes, timeout_s: float) -> bytes:
        if self._channel is None:
            self._channel = self._open()
        try:
            async with asyncio.timeout(timeout_s + 1.0):  # backstop: gRPC enforces its own timeout
                return bytes(await self._channel.unary_unary(method)(data, timeout=timeout_s))
        except grpc.aio.AioRpcError as error:
            raise self._error_of_status(error) from None
        except TimeoutError:
            raise _call_failed("deadline_exceeded", "The safety kernel did not answer in time.") from None

    def _error_of_status(self, error: Any) -> RotaError:
        status, details = error.code(), (error.details() or "")[:200]
        if status is grpc.StatusCode.CANCELLED and self.is_closed:
            return Unavailable("The safety kernel was not called: this process is shutting down.")
        if status in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION):
            return InvalidInput(details or "The safety kernel rejected the request.")
        why = status.name.lower()
        return _call_failed(
            why, f"The safety kernel at {self._settings.safety_kernel.addr} did not answer ({why}): {details}"
        )

    def _open(self) -> Any:
        target = self._settings.safety_kernel
        secret = bearer_interceptors(target.shared_secret) if target.shared_secret else None
        if not target.tls_ca and not target.tls_required:
            if target.insecure:
                log.warning("safety_kernel_insecure", addr=target.addr, remedy="set safety_kernel.tls_ca")
            return grpc.aio.insecure_channel(target.addr, options=CHANNEL_OPTIONS, interceptors=secret)
        root_certificates = _read_file(target.tls_ca) if target.tls_ca else None
        return grpc.aio.secure_channel(
            target.addr, grpc.ssl_channel_credentials(root_certificates), CHANNEL_OPTIONS, None, secret
        )

    async def close(self) -> None:
        self.is_closed = True
        if self._channel is not None:
            await self._channel.close(None)


class RemoteKernel:
    """A remote `PolicyKernel`."""

    def __init__(self, settings: Settings, redis: Redis | None, *, clock: Clock | None = None) -> None:
        self.breaker = make_breaker(INPUT_BREAKER, settings, redis, clock)
        self.fail_mode: str | None = None
        self._channel = KernelChannel(settings)
        self._codec = KernelClientCodec()
        self._timeout_s = settings.safety.timeout

    async def check(self, questions: Sequence[PolicyRequestGroup]) -> list[PolicyDecision]:
        decisions: list[PolicyDecision] = []
        for at in range(0, len(questions), QUESTIONS_MAX):
            decisions += await self._check_batch(questions[at : at + QUESTIONS_MAX])
        return decisions

    async def _check_batch(self, questions: Sequence[PolicyRequestGroup]) -> list[PolicyDecision]:
        async def ask() -> list[PolicyDecision]:
            reply = await self._call("CheckBatch", self._codec.encode_questions(questions), messages.RawBatchReply)
            decisions = _read_decisions(len(questions), len(reply.words), lambda: self._codec.decode_decisions(reply))
            self.fail_mode = reply.fail_mode if reply.fail_mode in ("open", "closed") else None
            return decisions

        return await call_with_breaker(self.breaker, ask, lambda: self._channel.is_closed)

    async def explain(self, asked: PolicyRequest, snapshot: str = "") -> PolicyExplanation:
        request = messages.EvaluateRequest(messages.request_to_message(asked), snapshot)
        reply = await self._call("Explain", request, messages.ExplainReply)
        return PolicyExplanation(
            messages.decision_of_message(reply.word or messages.PolicyDecisionMessage()),
            [_rule_result(each) for each in reply.findings],
        )

    async def simulate(self, text: str, asked: Sequence[PolicyRequest]) -> list[PolicyDecision]:
        decisions: list[PolicyDecision] = []
        for at in range(0, len(asked), QUESTIONS_MAX):
            batch = tuple(
                messages.PolicyQuestionMessage(messages.request_to_message(each))
                for each in asked[at : at + QUESTIONS_MAX]
            )
            reply = await self._call("Simulate", messages.SimulateRequest(text, batch), messages.CheckBatchReply)
            decisions += _read_decisions(len(batch), len(reply.words), partial(_decode_decisions, reply))
        return decisions

    async def list_snapshots(self) -> list[PolicySnapshot]:
        reply = await self._call("ListSnapshots", messages.ListSnapshotsRequest(), messages.ListSnapshotsReply)
        return [PolicySnapshot(each.id, each.loaded_ms, each.rules, each.source) for each in reply.snapshots]

    async def reload(self) -> bool:
        return (await self._call("Reload", messages.ReloadRequest(), messages.ReloadReply)).changed

    async def _call(self, method: str, request: ProtobufMessage, reply: type[MessageT]) -> MessageT:
        return await self._channel.call(f"/rota.v1.SafetyKernel/{method}", request, reply, self._timeout_s)

    def services(self, database: Database | None = None) -> list[Service]:  # noqa: ARG002 - LocalKernel uses it
        return []

    async def close(self) -> None:
        await self._channel.close()


class RemoteOutputKernel:
    """Checks outputs at a remote kernel, with a separate breaker."""

    def __init__(self, settings: Settings, redis: Redis | None, *, clock: Clock | None = None) -> None:
        self.breaker = make_breaker(OUTPUT_BREAKER, settings, redis, clock)
        self._channel = KernelChannel(settings)

    async def check_output(self, asked_json: str, content: bytes, timeout_s: float) -> str:
        """The decision as JSON. Raises Unavailable if there is none."""

        async def ask() -> str:
            request = messages.CheckOutputRequest(asked_json, content)
            method = "/rota.v1.OutputPolicyService/CheckOutput"
            reply = await self._channel.call(method, request, messages.CheckOutputReply, timeout_s)
            if not reply.word_json:
                raise _call_failed(
                    "garbage", f"The safety kernel returned no decision about an output: {CHECK_VERSION}"
                )
            return reply.word_json

        return await call_with_breaker(self.breaker, ask, lambda: self._channel.is_closed)

    async def close(self) -> None:
        await self._channel.close()


def make_breaker(name: str, settings: Settings, redis: Redis | None, clock: Clock | None = None) -> Breaker:
    """A breaker shared through Redis; local to the process without Redis."""
    safety, clock = settings.safety, clock or SystemClock()
    rules = BreakerConfig(
        counting=ConsecutiveFailures(safety.circuit_fail_budget),
        open_ms=int(safety.circuit_open_for * 1000),
        probing=ProbesByCount(
            safety.circuit_half_open_max,
            successes=safety.circuit_close_after,
            lost_after_ms=int((safety.timeout + LOST_AFTER_S) * 1000),
        ),
    )
    if redis is None:
        return Breaker.in_process(name, rules, clock, _is_failure)
    return Breaker.shared(name, rules, clock, redis, RedisKeys(), _is_failure)


def _is_failure(error: Exception) -> bool:
    return not isinstance(error, KernelRejectedRequest)


async def call_with_breaker(breaker: Breaker, ask: Callable[[], Awaitable[T]], is_closed: Callable[[], bool]) -> T:
    """The result of `ask`. A call that `close` ends counts neither as success nor as failure."""
    try:
        permit = await breaker.allow()
    except BreakerOpen as error:
        raise BreakerOpen(f"{CIRCUIT_OPEN}: {error.sentence}", **error.facts) from None
    try:
        result = await ask()
    except InvalidInput as refused:
        await breaker.success(permit)
        raise KernelRejectedRequest(f"The safety kernel rejected the request: {refused.sentence}") from refused
    except Exception:
        await (breaker.cancel(permit) if is_closed() else breaker.failure(permit))
        raise
    except BaseException:
        await breaker.cancel(permit)
        raise
    await breaker.success(permit)
    return result


def _call_failed(why: str, sentence: str) -> Unavailable:
    FAILED.labels(why).inc()
    return Unavailable(sentence, why=why)


def _decode_decisions(reply: messages.CheckBatchReply) -> list[PolicyDecision]:
    return [messages.decision_of_message(each) for each in reply.words]


def _read_decisions(expected: int, received: int, decode: Callable[[], list[PolicyDecision]]) -> list[PolicyDecision]:
    if received != expected:
        raise _call_failed(
            "garbage", f"The safety kernel returned {received} decisions for {expected} questions: {CHECK_VERSION}"
        )
    try:
        return decode()
    except InvalidInput as error:
        raise _call_failed("garbage", f"The safety kernel returned an invalid decision: {error.sentence}") from error


def _rule_result(message: messages.RuleResultMessage) -> RuleResult:
    try:
        return RuleResult(
            message.rule_id, message.line, PolicyEffect(message.decision), RuleStatus(message.fate), message.why
        )
    except ValueError as error:
        raise _call_failed("garbage", f"The safety kernel returned an unknown rule status: {CHECK_VERSION}") from error


def _read_file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidSetting(f"safety_kernel.tls_ca cannot be read ({error.strerror}): name a PEM file.") from error
