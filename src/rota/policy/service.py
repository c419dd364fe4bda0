"""The safety kernel over gRPC, as `safety.proto` has it: what `LocalKernel` says, for those who are elsewhere.

`outputs` answers what is asked about outputs; without it that call is refused, and the rest is served.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol
from uuid import UUID

from rota.infra.rpc.calls import Call
from rota.model import policy as model
from rota.model.errors import InvalidInput, Refused
from rota.model.ids import JobId
from rota.policy import wire
from rota.policy.interned import Answering
from rota.policy.kernel import LocalKernel
from rota.policy.snapshots import Snapshot


class OutputChecker(Protocol):
    async def check_output(self, asked_json: str, content: bytes) -> str:
        """A word as JSON for what is asked as JSON. Raises InvalidInput for what makes no sense."""
        ...


class SafetyKernel:
    name = "rota.v1.SafetyKernel"

    def __init__(self, kernel: LocalKernel) -> None:
        self._kernel = kernel
        self._answering = Answering()

    def calls(self) -> Mapping[str, Call[Any]]:
        return {
            "Check": Call(wire.CheckRequest, self.check),
            "CheckBatch": Call(wire.RawBatchRequest, self.check_batch),
            "Evaluate": Call(wire.EvaluateRequest, self.evaluate),
            "Explain": Call(wire.EvaluateRequest, self.explain),
            "Simulate": Call(wire.SimulateRequest, self.simulate),
            "ListSnapshots": Call(wire.ListSnapshotsRequest, self.list_snapshots),
            "Reload": Call(wire.ReloadRequest, self.reload),
        }

    async def check(self, request: wire.CheckRequest, _caller: str) -> wire.CheckReply:
        question = model.Question(wire.asked_heard(request.asked), _job(request.job_id))
        [word] = await self._kernel.check([self._countable(question)])
        return wire.CheckReply(wire.word_sent(word))

    async def check_batch(self, request: wire.RawBatchRequest, _caller: str) -> wire.RawBatchReply:
        questions = [self._countable(each) for each in self._answering.questions(request)]
        return self._answering.reply(await self._kernel.check(questions), self._kernel.fail_mode or "")

    async def evaluate(self, request: wire.EvaluateRequest, _caller: str) -> wire.CheckReply:
        found = await self._kernel.explain(wire.asked_heard(request.asked), request.snapshot)
        return wire.CheckReply(wire.word_sent(found.word))

    async def explain(self, request: wire.EvaluateRequest, _caller: str) -> wire.ExplainReply:
        found = await self._kernel.explain(wire.asked_heard(request.asked), request.snapshot)
        told = tuple(wire.Finding(each.rule, each.line, each.says, each.fate, each.why) for each in found.findings)
        return wire.ExplainReply(wire.word_sent(found.word), told)

    async def simulate(self, request: wire.SimulateRequest, _caller: str) -> wire.CheckBatchReply:
        asked = [wire.asked_heard(each.asked) for each in request.questions]
        return wire.CheckBatchReply(tuple(map(wire.word_sent, await self._kernel.simulate(request.policy, asked))))

    async def list_snapshots(self, _request: wire.ListSnapshotsRequest, _caller: str) -> wire.ListSnapshotsReply:
        return wire.ListSnapshotsReply(tuple(map(_snapshot, self._kernel.snapshots.listed())))

    async def reload(self, _request: wire.ReloadRequest, _caller: str) -> wire.ReloadReply:
        changed = await self._kernel.reload()
        return wire.ReloadReply(changed, _snapshot(self._kernel.snapshots.listed()[0]))

    def _countable(self, question: model.Question) -> model.Question:
        if not question.jobs and self._kernel.snapshots.current.counts:
            raise InvalidInput("The policy counts jobs, so name the job that is asked about; Evaluate needs none.")
        return question


class OutputPolicyService:
    name = "rota.v1.OutputPolicyService"

    def __init__(self, outputs: OutputChecker | None = None) -> None:
        self._outputs = outputs

    def calls(self) -> Mapping[str, Call[Any]]:
        return {"CheckOutput": Call(wire.CheckOutputRequest, self.check_output)}

    async def check_output(self, request: wire.CheckOutputRequest, _caller: str) -> wire.CheckOutputReply:
        if self._outputs is None:
            raise Refused("No outputs are checked here: the policy has no output rules.")
        return wire.CheckOutputReply(await self._outputs.check_output(request.asked_json, request.content))


def _job(text: str) -> tuple[JobId, ...]:
    if not text:
        return ()
    try:
        return (JobId(UUID(text)),)
    except ValueError:
        raise InvalidInput("The id of a job is a UUID.") from None


def _snapshot(told: Snapshot) -> wire.Snapshot:
    return wire.Snapshot(told.id, told.loaded_ms, told.rules, told.source)
