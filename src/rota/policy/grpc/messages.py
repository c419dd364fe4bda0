"""The protobuf messages of `safety.proto`, and their conversion to and from the model.

Replies are not trusted: an unknown decision is DENY, and any other malformed content (a wrong number of decisions,
invalid ids) raises InvalidInput, which the client treats as no answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final
from uuid import UUID

import msgspec

from rota.infra.rpc.protobuf import ProtobufMessage
from rota.model.errors import InvalidInput
from rota.model.ids import JobId
from rota.model.policy import decision as model
from rota.model.policy.decision import PolicyEffect

ID_BYTES: Final = 16


class DecisionCode(IntEnum):
    DECISION_UNSPECIFIED = 0
    ALLOW = 1
    DENY = 2
    REQUIRE_HUMAN = 3
    THROTTLE = 4
    ALLOW_WITH_CONSTRAINTS = 5


CODES: Final = {
    PolicyEffect.ALLOW: DecisionCode.ALLOW,
    PolicyEffect.DENY: DecisionCode.DENY,
    PolicyEffect.REQUIRE_APPROVAL: DecisionCode.REQUIRE_HUMAN,
    PolicyEffect.THROTTLE: DecisionCode.THROTTLE,
    PolicyEffect.ALLOW_WITH_CONSTRAINTS: DecisionCode.ALLOW_WITH_CONSTRAINTS,
}
EFFECTS: Final = {decision: says for says, decision in CODES.items()}
UNKNOWN_DECISION_REASON: Final = "the kernel returned an unknown decision"


class PolicyRequestMessage(ProtobufMessage, frozen=True):
    show: str = ""
    topic: str = ""
    priority: int | None = None
    folder: str = ""
    dept: str = ""
    capability: str = ""
    risk_tags: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    actor_id: str = ""
    actor_type: str = ""
    tenant: str = ""
    principal: str = ""
    pack_id: str = ""
    adapter_id: str = ""
    workflow_id: str = ""
    tasks: tuple[str, ...] = ()
    env_names: tuple[str, ...] = ()
    frames: int | None = None
    cores: float | None = None
    gpus: int = 0
    input_bytes: int = 0
    deadline_ms: int = 0


class ConstraintsMessage(ProtobufMessage, frozen=True):
    max_runtime_ms: int = 0
    max_retries: int | None = None
    max_artifact_bytes: int = 0
    max_concurrent_jobs: int = 0
    sandbox_json: str = ""
    toolchain_json: str = ""
    diff_json: str = ""
    redaction_level: str = ""


class RemediationMessage(ProtobufMessage, frozen=True):
    id: str = ""
    title: str = ""
    summary: str = ""
    replacement_topic: str = ""
    replacement_capability: str = ""
    add_labels: dict[str, str] = msgspec.field(default_factory=dict)
    remove_labels: tuple[str, ...] = ()


class ApprovalTermsMessage(ProtobufMessage, frozen=True):
    quorum: int = 0
    expires_s: float = 0.0
    approvers: tuple[str, ...] = ()


class DecisionOverrideMessage(ProtobufMessage, frozen=True):
    jobs: bytes = b""
    decision: DecisionCode = DecisionCode.DECISION_UNSPECIFIED
    reason: str = ""
    rule_id: str = ""
    constraints: ConstraintsMessage | None = None
    remediations: tuple[RemediationMessage, ...] = ()
    approval: ApprovalTermsMessage | None = None
    delay_s: float = 0.0


class PolicyDecisionMessage(ProtobufMessage, frozen=True):
    decision: DecisionCode = DecisionCode.DECISION_UNSPECIFIED
    reason: str = ""
    rule_id: str = ""
    policy_snapshot: str = ""
    constraints: ConstraintsMessage | None = None
    remediations: tuple[RemediationMessage, ...] = ()
    approval: ApprovalTermsMessage | None = None
    delay_s: float = 0.0
    apart: tuple[DecisionOverrideMessage, ...] = ()


class CheckRequest(ProtobufMessage, frozen=True):
    job_id: str = ""
    asked: PolicyRequestMessage | None = None


class CheckReply(ProtobufMessage, frozen=True):
    word: PolicyDecisionMessage | None = None


class PolicyQuestionMessage(ProtobufMessage, frozen=True):
    asked: PolicyRequestMessage | None = None
    jobs: bytes = b""


class CheckBatchRequest(ProtobufMessage, frozen=True):
    """As clients know it; the service receives it as `RawBatchRequest`."""

    questions: tuple[PolicyQuestionMessage, ...] = ()


class CheckBatchReply(ProtobufMessage, frozen=True):
    words: tuple[PolicyDecisionMessage, ...] = ()
    fail_mode: str = ""


class RawQuestion(ProtobufMessage, frozen=True):
    """A `Question` with its request left encoded: on the wire a message and bytes are the same."""

    asked: bytes = b""
    jobs: bytes = b""


class RawBatchRequest(ProtobufMessage, frozen=True):
    questions: tuple[RawQuestion, ...] = ()


class RawBatchReply(ProtobufMessage, frozen=True):
    words: tuple[bytes, ...] = ()
    fail_mode: str = ""


class EvaluateRequest(ProtobufMessage, frozen=True):
    asked: PolicyRequestMessage | None = None
    snapshot: str = ""


class RuleResultMessage(ProtobufMessage, frozen=True):
    rule_id: str = ""
    line: int = 0
    decision: str = ""
    fate: str = ""
    why: str = ""


class ExplainReply(ProtobufMessage, frozen=True):
    word: PolicyDecisionMessage | None = None
    findings: tuple[RuleResultMessage, ...] = ()


class SimulateRequest(ProtobufMessage, frozen=True):
    policy: str = ""
    questions: tuple[PolicyQuestionMessage, ...] = ()


class ListSnapshotsRequest(ProtobufMessage, frozen=True):
    pass


class SnapshotMessage(ProtobufMessage, frozen=True):
    id: str = ""
    loaded_ms: int = 0
    rules: int = 0
    source: str = ""


class ListSnapshotsReply(ProtobufMessage, frozen=True):
    snapshots: tuple[SnapshotMessage, ...] = ()


class ReloadRequest(ProtobufMessage, frozen=True):
    pass


class ReloadReply(ProtobufMessage, frozen=True):
    changed: bool = False
    snapshot: SnapshotMessage | None = None


class CheckOutputRequest(ProtobufMessage, frozen=True):
    asked_json: str = ""
    content: bytes = b""


class CheckOutputReply(ProtobufMessage, frozen=True):
    word_json: str = ""


def request_to_message(request: model.PolicyRequest) -> PolicyRequestMessage:
    return PolicyRequestMessage(*msgspec.structs.astuple(request))


def request_of_message(message: PolicyRequestMessage | None) -> model.PolicyRequest:
    """Missing fields get their defaults."""
    if message is None or not message.topic:
        raise InvalidInput("The request describes no job: set at least its show and topic.")
    fields = {name: value for name, value in msgspec.structs.asdict(message).items() if value is not None}
    return model.PolicyRequest(**fields)


def pack_ids(jobs: Sequence[JobId]) -> bytes:
    return b"".join([job.bytes for job in jobs])


def unpack_ids(data: bytes) -> tuple[JobId, ...]:
    if len(data) % ID_BYTES:
        raise InvalidInput("The job ids are malformed: send 16 bytes for each, concatenated.")
    return tuple(JobId(UUID(bytes=data[at : at + ID_BYTES])) for at in range(0, len(data), ID_BYTES))


def decision_to_message(decision: model.PolicyDecision) -> PolicyDecisionMessage:
    apart = tuple(
        DecisionOverrideMessage(pack_ids(sorted(each.jobs)), *_decision_fields(each.word)) for each in decision.apart
    )
    code, reason, rule, *rest = _decision_fields(decision)
    return PolicyDecisionMessage(*(code, reason, rule, decision.snapshot, *rest, apart))


def _decision_fields(decision: model.PolicyDecision) -> tuple[Any, ...]:
    approval = decision.approval
    asks = decision.says is PolicyEffect.REQUIRE_APPROVAL
    return (
        CODES[decision.says],
        decision.reason,
        decision.rule,
        _constraints_to_message(decision.constraints),
        tuple(RemediationMessage(*msgspec.structs.astuple(each)) for each in decision.remediations),
        ApprovalTermsMessage(approval.quorum, approval.expires_s, approval.approvers) if asks else None,
        decision.delay_s,
    )


def _constraints_to_message(constraints: model.Constraints | None) -> ConstraintsMessage | None:
    if constraints is None:
        return None
    budgets = constraints.budgets
    return ConstraintsMessage(
        max_runtime_ms=budgets.max_runtime_ms,
        max_retries=budgets.max_retries if budgets.max_retries >= 0 else None,
        max_artifact_bytes=budgets.max_artifact_bytes,
        max_concurrent_jobs=budgets.max_concurrent_jobs,
        sandbox_json=_json(constraints.sandbox),
        toolchain_json=_json(constraints.toolchain),
        diff_json=_json(constraints.diff),
        redaction_level=constraints.redaction_level,
    )


def _json(table: dict[str, object]) -> str:
    return msgspec.json.encode(table).decode() if table else ""


def decision_of_message(message: PolicyDecisionMessage) -> model.PolicyDecision:
    """An unknown decision denies."""
    found = _single_decision(message, message.policy_snapshot)
    if not message.apart:
        return found
    apart = tuple(
        model.DecisionOverride(frozenset(unpack_ids(each.jobs)), _single_decision(each, message.policy_snapshot))
        for each in message.apart
    )
    return msgspec.structs.replace(found, apart=apart)


def _single_decision(message: PolicyDecisionMessage | DecisionOverrideMessage, snapshot: str) -> model.PolicyDecision:
    says = EFFECTS.get(message.decision)
    if says is None:
        return model.PolicyDecision(
            says=PolicyEffect.DENY, reason=UNKNOWN_DECISION_REASON, rule=message.rule_id, snapshot=snapshot
        )
    terms = message.approval
    return model.PolicyDecision(
        says=says,
        reason=message.reason,
        rule=message.rule_id,
        snapshot=snapshot,
        constraints=_constraints_of_message(message.constraints),
        remediations=tuple(model.Remediation(**msgspec.structs.asdict(each)) for each in message.remediations),
        approval=(
            model.ApprovalTerms(quorum=max(1, terms.quorum), expires_s=terms.expires_s, approvers=terms.approvers)
            if terms
            else model.ApprovalTerms()
        ),
        delay_s=message.delay_s,
    )


def _constraints_of_message(constraints: ConstraintsMessage | None) -> model.Constraints | None:
    if constraints is None:
        return None
    budgets = model.PolicyBudgets(
        max_runtime_ms=constraints.max_runtime_ms,
        max_retries=-1 if constraints.max_retries is None else constraints.max_retries,
        max_artifact_bytes=constraints.max_artifact_bytes,
        max_concurrent_jobs=constraints.max_concurrent_jobs,
    )
    return model.Constraints(
        budgets=budgets,
        sandbox=_parse_table(constraints.sandbox_json),
        toolchain=_parse_table(constraints.toolchain_json),
        diff=_parse_table(constraints.diff_json),
        redaction_level=constraints.redaction_level,
    )


def _parse_table(text: str) -> dict[str, object]:
    if not text:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.DecodeError:
        raise InvalidInput("The constraints of a decision are not valid JSON.") from None
