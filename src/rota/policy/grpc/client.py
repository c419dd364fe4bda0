"""Asks a safety kernel that is elsewhere, over gRPC.

- An answer within `safety.timeout`, or none: whatever comes of a call that is no answer (nobody there, too late, bytes
  that are no message, another number of words than questions, a defect of the kernel's) is `Unavailable`. A decision
  that is not known here denies. Nothing that is heard can allow by accident.
- A breaker that all replicas share stops asking a kernel that fails, and tries it again with a few calls
  (`safety.circuit_*`); while it is open, `BreakerOpen`. With Redis away each replica has its own (ADR 6).
- A call that is cancelled says nothing of the kernel. Once we close, nothing is asked and nothing counted.
- A kernel that comes back is reached again within a second: gRPC's own pause between tries is kept short.

If we die in a call, the kernel has counted the jobs under their velocity limits, if at all, and counts them once.
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
"""Names of the breakers, for what is asked about jobs and about outputs."""
CIRCUIT_OPEN: Final = "safety kernel circuit open"
QUESTIONS_MAX: Final = 512
"""Of one call."""
LOST_AFTER_S: Final = 5.0
REPLY_BYTES_MAX: Final = 16 * 1024 * 1024
CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", REPLY_BYTES_MAX),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
)

LATENCY = metrics.histogram("rota_policy_call_seconds", "Calls to the safety kernel.", labels=("method",))
FAILED = metrics.counter("rota_policy_call_failures", "Calls to the safety kernel without an answer.", labels=("why",))


class KernelRejectedRequest(Unavailable):
    """The kernel is well and refuses what we ask: no reason to stop asking it other things."""


class KernelChannel:
    """One connection to the kernel, made by the first call."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._channel: Any = None
        self.is_closed = False

    async def call(self, method: str, request: ProtobufMessage, reply: type[MessageT], timeout_s: float) -> MessageT:
        """Raises InvalidInput for what the kernel refuses, Unavailable for everything that is no answer."""
        if self.is_closed:
            raise Unavailable("The safety kernel is not asked any more: this process is ending.")
        with LATENCY.labels(method.rpartition("/")[2]).time():
            data = await self._unary_call(method, encode(request), timeout_s)
        failpoints.after_send("policy.call")
        try:
            return decode(data, reply)
        except InvalidInput as wrong:
            raise _call_failed("garbage", "What the safety kernel answers is no message of its .proto file.") from wrong

    async def _unary_call(self, method: str, data: bytes, timeout_s: float) -> bytes:
        if self._channel is None:
            self._channel = self._open()
        try:
            async with asyncio.timeout(timeout_s + 1.0):  # gRPC keeps its own; this one is for when it does not
                return bytes(await self._channel.unary_unary(method)(data, timeout=timeout_s))
        except grpc.aio.AioRpcError as error:
            raise self._error_of_status(error) from None
        except TimeoutError:
            raise _call_failed("deadline_exceeded", "The safety kernel does not answer in time.") from None

    def _error_of_status(self, error: Any) -> RotaError:
        status, said = error.code(), (error.details() or "")[:200]
        if status is grpc.StatusCode.CANCELLED and self.is_closed:
            return Unavailable("The safety kernel is not asked any more: this process is ending.")
        if status in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION):
            return InvalidInput(said or "The safety kernel refuses what it was asked.")
        why = status.name.lower()
        return _call_failed(
            why, f"The safety kernel at {self._settings.safety_kernel.addr} gives no answer ({why}): {said}"
        )

    def _open(self) -> Any:
        wanted = self._settings.safety_kernel
        secret = bearer_interceptors(wanted.shared_secret) if wanted.shared_secret else None
        if not wanted.tls_ca and not wanted.tls_required:
            if wanted.insecure:
                log.warning("safety_kernel_insecure", addr=wanted.addr, remedy="set safety_kernel.tls_ca")
            return grpc.aio.insecure_channel(wanted.addr, options=CHANNEL_OPTIONS, interceptors=secret)
        trusted = _read_file(wanted.tls_ca) if wanted.tls_ca else None
        return grpc.aio.secure_channel(
            wanted.addr, grpc.ssl_channel_credentials(trusted), CHANNEL_OPTIONS, None, secret
        )

    async def close(self) -> None:
        self.is_closed = True
        if self._channel is not None:
            await self._channel.close(None)


class RemoteKernel:
    """A `PolicyKernel` elsewhere."""

    def __init__(self, settings: Settings, redis: Redis | None, *, clock: Clock | None = None) -> None:
        self.breaker = make_breaker(INPUT_BREAKER, settings, redis, clock)
        self.fail_mode: str | None = None
        self._channel = KernelChannel(settings)
        self._asking = KernelClientCodec()
        self._timeout_s = settings.safety.timeout

    async def check(self, questions: Sequence[PolicyRequestGroup]) -> list[PolicyDecision]:
        words: list[PolicyDecision] = []
        for at in range(0, len(questions), QUESTIONS_MAX):
            words += await self._check_batch(questions[at : at + QUESTIONS_MAX])
        return words

    async def _check_batch(self, questions: Sequence[PolicyRequestGroup]) -> list[PolicyDecision]:
        async def ask() -> list[PolicyDecision]:
            reply = await self._call("CheckBatch", self._asking.encode_questions(questions), messages.RawBatchReply)
            words = _read_decisions(len(questions), len(reply.words), lambda: self._asking.decode_decisions(reply))
            self.fail_mode = reply.fail_mode if reply.fail_mode in ("open", "closed") else None
            return words

        return await call_with_breaker(self.breaker, ask, lambda: self._channel.is_closed)

    async def explain(self, asked: PolicyRequest, snapshot: str = "") -> PolicyExplanation:
        request = messages.EvaluateRequest(messages.request_to_message(asked), snapshot)
        reply = await self._call("Explain", request, messages.ExplainReply)
        return PolicyExplanation(
            messages.decision_of_message(reply.word or messages.PolicyDecisionMessage()),
            [_rule_result(each) for each in reply.findings],
        )

    async def simulate(self, text: str, asked: Sequence[PolicyRequest]) -> list[PolicyDecision]:
        words: list[PolicyDecision] = []
        for at in range(0, len(asked), QUESTIONS_MAX):
            some = tuple(
                messages.PolicyQuestionMessage(messages.request_to_message(each))
                for each in asked[at : at + QUESTIONS_MAX]
            )
            reply = await self._call("Simulate", messages.SimulateRequest(text, some), messages.CheckBatchReply)
            words += _read_decisions(len(some), len(reply.words), partial(_decode_decisions, reply))
        return words

    async def list_snapshots(self) -> list[PolicySnapshot]:
        reply = await self._call("ListSnapshots", messages.ListSnapshotsRequest(), messages.ListSnapshotsReply)
        return [PolicySnapshot(each.id, each.loaded_ms, each.rules, each.source) for each in reply.snapshots]

    async def reload(self) -> bool:
        return (await self._call("Reload", messages.ReloadRequest(), messages.ReloadReply)).changed

    async def _call(self, method: str, request: ProtobufMessage, reply: type[MessageT]) -> MessageT:
        return await self._channel.call(f"/rota.v1.SafetyKernel/{method}", request, reply, self._timeout_s)

    def services(self, database: Database | None = None) -> list[Service]:  # noqa: ARG002 - a kernel here has some
        return []

    async def close(self) -> None:
        await self._channel.close()


class RemoteOutputKernel:
    """Asks a kernel elsewhere about outputs, under a breaker of their own."""

    def __init__(self, settings: Settings, redis: Redis | None, *, clock: Clock | None = None) -> None:
        self.breaker = make_breaker(OUTPUT_BREAKER, settings, redis, clock)
        self._channel = KernelChannel(settings)

    async def check_output(self, asked_json: str, content: bytes, timeout_s: float) -> str:
        """A word as JSON. Raises Unavailable when there is none."""

        async def ask() -> str:
            request = messages.CheckOutputRequest(asked_json, content)
            method = "/rota.v1.OutputPolicyService/CheckOutput"
            reply = await self._channel.call(method, request, messages.CheckOutputReply, timeout_s)
            if not reply.word_json:
                raise _call_failed("garbage", "The safety kernel says nothing of an output: is it of this version?")
            return reply.word_json

        return await call_with_breaker(self.breaker, ask, lambda: self._channel.is_closed)

    async def close(self) -> None:
        await self._channel.close()


def make_breaker(name: str, settings: Settings, redis: Redis | None, clock: Clock | None = None) -> Breaker:
    """Shared by all who have this Redis; of this process alone without one."""
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


async def call_with_breaker(by: Breaker, ask: Callable[[], Awaitable[T]], is_closed: Callable[[], bool]) -> T:
    """What `ask` gives; a call that ends because we do is neither a success nor a failure."""
    try:
        permit = await by.allow()
    except BreakerOpen as error:
        raise BreakerOpen(f"{CIRCUIT_OPEN}: {error.sentence}", **error.facts) from None
    try:
        found = await ask()
    except InvalidInput as refused:
        await by.success(permit)
        raise KernelRejectedRequest(f"The safety kernel refuses what it was asked: {refused.sentence}") from refused
    except Exception:
        await (by.cancel(permit) if is_closed() else by.failure(permit))
        raise
    except BaseException:
        await by.cancel(permit)
        raise
    await by.success(permit)
    return found


def _call_failed(why: str, sentence: str) -> Unavailable:
    FAILED.labels(why).inc()
    return Unavailable(sentence, why=why)


def _decode_decisions(reply: messages.CheckBatchReply) -> list[PolicyDecision]:
    return [messages.decision_of_message(word) for word in reply.words]


def _read_decisions(asked: int, came: int, heard: Callable[[], list[PolicyDecision]]) -> list[PolicyDecision]:
    if came != asked:
        raise _call_failed(
            "garbage", f"The safety kernel gives {came} words on {asked} questions: is it of this version?"
        )
    try:
        return heard()
    except InvalidInput as wrong:
        raise _call_failed("garbage", f"The safety kernel says what makes no sense: {wrong.sentence}") from wrong


def _rule_result(told: messages.RuleResultMessage) -> RuleResult:
    try:
        return RuleResult(told.rule_id, told.line, PolicyEffect(told.decision), RuleStatus(told.fate), told.why)
    except ValueError as wrong:
        raise _call_failed("garbage", "The safety kernel explains in words that are not known here.") from wrong


def _read_file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as wrong:
        raise InvalidSetting(f"safety_kernel.tls_ca cannot be read ({wrong.strerror}): name a PEM file.") from wrong
