"""The gRPC services of the safety kernel (`safety.proto`), backed by `LocalKernel`.

`outputs` serves the calls about outputs; without it those are refused, and the rest is served.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol
from uuid import UUID

from rota.infra.rpc.calls import RpcMethod
from rota.model.errors import InvalidInput, Refused
from rota.model.ids import JobId
from rota.model.policy import decision as model
from rota.policy.grpc import messages
from rota.policy.grpc.request_cache import KernelServerCodec
from rota.policy.kernel import LocalKernel
from rota.policy.snapshots import PolicySnapshot


class OutputChecker(Protocol):
    async def check_output(self, asked_json: str, content: bytes) -> str:
        """The decision as JSON for a request as JSON. Raises InvalidInput for a malformed request."""
        ...


class SafetyKernelService:
    name = "rota.v1.SafetyKernel"

    def __init__(self, kernel: LocalKernel) -> None:
        self._kernel = kernel
        self._codec = KernelServerCodec()

    def methods(self) -> Mapping[str, RpcMethod[Any]]:
        return {
            "Check": RpcMethod(messages.CheckRequest, self.check),
            "CheckBatch": RpcMethod(messages.RawBatchRequest, self.check_batch),
            "Evaluate": RpcMethod(messages.EvaluateRequest, self.evaluate),
            "Explain": RpcMethod(messages.EvaluateRequest, self.explain),
            "Simulate": RpcMethod(messages.SimulateRequest, self.simulate),
            "ListSnapshots": RpcMethod(messages.ListSnapshotsRequest, self.list_snapshots),
            "Reload": RpcMethod(messages.ReloadRequest, self.reload),
        }

    async def check(self, request: messages.CheckRequest, _caller: str) -> messages.CheckReply:
        question = model.PolicyRequestGroup(messages.request_of_message(request.asked), _parse_job_id(request.job_id))
        [decision] = await self._kernel.check([self._require_job_ids(question)])
        return messages.CheckReply(messages.decision_to_message(decision))

    async def check_batch(self, request: messages.RawBatchRequest, _caller: str) -> messages.RawBatchReply:
        questions = [self._require_job_ids(each) for each in self._codec.decode_questions(request)]
        return self._codec.encode_decisions(await self._kernel.check(questions), self._kernel.fail_mode or "")

    async def evaluate(self, request: messages.EvaluateRequest, _caller: str) -> messages.CheckReply:
        found = await self._kernel.explain(messages.request_of_message(request.asked), request.snapshot)
        return messages.CheckReply(messages.decision_to_message(found.word))

    async def explain(self, request: messages.EvaluateRequest, _caller: str) -> messages.ExplainReply:
        found = await self._kernel.explain(messages.request_of_message(request.asked), request.snapshot)
        results = tuple(
            messages.RuleResultMessage(each.rule, each.line, each.says, each.fate, each.why) for each in found.findings
        )
        return messages.ExplainReply(messages.decision_to_message(found.word), results)

    async def simulate(self, request: messages.SimulateRequest, _caller: str) -> messages.CheckBatchReply:
        requests = [messages.request_of_message(each.asked) for each in request.questions]
        return messages.CheckBatchReply(
            tuple(map(messages.decision_to_message, await self._kernel.simulate(request.policy, requests)))
        )

    async def list_snapshots(
        self, _request: messages.ListSnapshotsRequest, _caller: str
    ) -> messages.ListSnapshotsReply:
        return messages.ListSnapshotsReply(tuple(map(_snapshot_message, self._kernel.snapshots.list_snapshots())))

    async def reload(self, _request: messages.ReloadRequest, _caller: str) -> messages.ReloadReply:
        changed = await self._kernel.reload()
        return messages.ReloadReply(changed, _snapshot_message(self._kernel.snapshots.list_snapshots()[0]))

    def _require_job_ids(self, question: model.PolicyRequestGroup) -> model.PolicyRequestGroup:
        if not question.jobs and self._kernel.snapshots.current.counts:
            raise InvalidInput(
                "The policy has velocity limits and the request has no job id: send one, or call Evaluate."
            )
        return question


class OutputPolicyService:
    name = "rota.v1.OutputPolicyService"

    def __init__(self, outputs: OutputChecker | None = None) -> None:
        self._outputs = outputs

    def methods(self) -> Mapping[str, RpcMethod[Any]]:
        return {"CheckOutput": RpcMethod(messages.CheckOutputRequest, self.check_output)}

    async def check_output(self, request: messages.CheckOutputRequest, _caller: str) -> messages.CheckOutputReply:
        if self._outputs is None:
            raise Refused("This kernel checks no outputs: the policy has no output rules.")
        return messages.CheckOutputReply(await self._outputs.check_output(request.asked_json, request.content))


def _parse_job_id(text: str) -> tuple[JobId, ...]:
    if not text:
        return ()
    try:
        return (JobId(UUID(text)),)
    except ValueError:
        raise InvalidInput("The job id is not a UUID: send one, or none.") from None


def _snapshot_message(snapshot: PolicySnapshot) -> messages.SnapshotMessage:
    return messages.SnapshotMessage(snapshot.id, snapshot.loaded_ms, snapshot.rules, snapshot.source)
