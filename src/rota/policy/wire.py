"""What travels between a kernel and those who ask it, as `safety.proto` has it, and how it becomes what we work with.

What is heard is never trusted to be right: a decision that is not known is DENY, and anything else that makes no sense
(another number of words than questions, ids that are none) raises InvalidInput, which the client takes for silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final
from uuid import UUID

import msgspec

from rota.infra.rpc.protobuf import Message
from rota.model import policy as model
from rota.model.errors import InvalidInput
from rota.model.ids import JobId
from rota.model.policy import Says

ID_BYTES: Final = 16


class Decision(IntEnum):
    DECISION_UNSPECIFIED = 0
    ALLOW = 1
    DENY = 2
    REQUIRE_HUMAN = 3
    THROTTLE = 4
    ALLOW_WITH_CONSTRAINTS = 5


DECISIONS: Final = {
    Says.ALLOW: Decision.ALLOW,
    Says.DENY: Decision.DENY,
    Says.REQUIRE_APPROVAL: Decision.REQUIRE_HUMAN,
    Says.THROTTLE: Decision.THROTTLE,
    Says.ALLOW_WITH_CONSTRAINTS: Decision.ALLOW_WITH_CONSTRAINTS,
}
SAYS: Final = {decision: says for says, decision in DECISIONS.items()}
UNKNOWN: Final = "the kernel gave a decision that is not known here"


class Asked(Message, frozen=True):
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


class Constraints(Message, frozen=True):
    max_runtime_ms: int = 0
    max_retries: int | None = None
    max_artifact_bytes: int = 0
    max_concurrent_jobs: int = 0
    sandbox_json: str = ""
    toolchain_json: str = ""
    diff_json: str = ""
    redaction_level: str = ""


class Remediation(Message, frozen=True):
    id: str = ""
    title: str = ""
    summary: str = ""
    replacement_topic: str = ""
    replacement_capability: str = ""
    add_labels: dict[str, str] = msgspec.field(default_factory=dict)
    remove_labels: tuple[str, ...] = ()


class ApprovalTerms(Message, frozen=True):
    quorum: int = 0
    expires_s: float = 0.0
    approvers: tuple[str, ...] = ()


class Apart(Message, frozen=True):
    jobs: bytes = b""
    decision: Decision = Decision.DECISION_UNSPECIFIED
    reason: str = ""
    rule_id: str = ""
    constraints: Constraints | None = None
    remediations: tuple[Remediation, ...] = ()
    approval: ApprovalTerms | None = None
    delay_s: float = 0.0


class Word(Message, frozen=True):
    decision: Decision = Decision.DECISION_UNSPECIFIED
    reason: str = ""
    rule_id: str = ""
    policy_snapshot: str = ""
    constraints: Constraints | None = None
    remediations: tuple[Remediation, ...] = ()
    approval: ApprovalTerms | None = None
    delay_s: float = 0.0
    apart: tuple[Apart, ...] = ()


class CheckRequest(Message, frozen=True):
    job_id: str = ""
    asked: Asked | None = None


class CheckReply(Message, frozen=True):
    word: Word | None = None


class Question(Message, frozen=True):
    asked: Asked | None = None
    jobs: bytes = b""


class CheckBatchRequest(Message, frozen=True):
    questions: tuple[Question, ...] = ()


class CheckBatchReply(Message, frozen=True):
    words: tuple[Word, ...] = ()
    fail_mode: str = ""


class RawQuestion(Message, frozen=True):
    """A `Question` whose job is not looked into: on the wire a message and bytes are the same."""

    asked: bytes = b""
    jobs: bytes = b""


class RawBatchRequest(Message, frozen=True):
    questions: tuple[RawQuestion, ...] = ()


class RawBatchReply(Message, frozen=True):
    words: tuple[bytes, ...] = ()
    fail_mode: str = ""


class EvaluateRequest(Message, frozen=True):
    asked: Asked | None = None
    snapshot: str = ""


class Finding(Message, frozen=True):
    rule_id: str = ""
    line: int = 0
    decision: str = ""
    fate: str = ""
    why: str = ""


class ExplainReply(Message, frozen=True):
    word: Word | None = None
    findings: tuple[Finding, ...] = ()


class SimulateRequest(Message, frozen=True):
    policy: str = ""
    questions: tuple[Question, ...] = ()


class ListSnapshotsRequest(Message, frozen=True):
    pass


class Snapshot(Message, frozen=True):
    id: str = ""
    loaded_ms: int = 0
    rules: int = 0
    source: str = ""


class ListSnapshotsReply(Message, frozen=True):
    snapshots: tuple[Snapshot, ...] = ()


class ReloadRequest(Message, frozen=True):
    pass


class ReloadReply(Message, frozen=True):
    changed: bool = False
    snapshot: Snapshot | None = None


class CheckOutputRequest(Message, frozen=True):
    asked_json: str = ""
    content: bytes = b""


class CheckOutputReply(Message, frozen=True):
    word_json: str = ""


def asked_sent(asked: model.Asked) -> Asked:
    return Asked(*msgspec.structs.astuple(asked))


def asked_heard(asked: Asked | None) -> model.Asked:
    """Of a caller who left a field out, the default of that field is meant."""
    if asked is None or not asked.topic:
        raise InvalidInput("The request asks about no job: say at least its show and its topic.")
    given = {name: value for name, value in msgspec.structs.asdict(asked).items() if value is not None}
    return model.Asked(**given)


def ids_sent(jobs: Sequence[JobId]) -> bytes:
    return b"".join([job.bytes for job in jobs])


def ids_heard(data: bytes) -> tuple[JobId, ...]:
    if len(data) % ID_BYTES:
        raise InvalidInput("The ids of jobs are 16 bytes each, one after the other.")
    return tuple(JobId(UUID(bytes=data[at : at + ID_BYTES])) for at in range(0, len(data), ID_BYTES))


def questions_sent(questions: Sequence[model.Question]) -> tuple[Question, ...]:
    return tuple(Question(asked_sent(each.asked), ids_sent(each.jobs)) for each in questions)


def questions_heard(questions: Sequence[Question]) -> list[model.Question]:
    return [model.Question(asked_heard(each.asked), ids_heard(each.jobs)) for each in questions]


def word_sent(word: model.Word) -> Word:
    apart = tuple(Apart(ids_sent(sorted(each.jobs)), *_told(each.word)) for each in word.apart)
    decision, reason, rule, *rest = _told(word)
    return Word(*(decision, reason, rule, word.snapshot, *rest, apart))


def _told(word: model.Word) -> tuple[Any, ...]:
    approval = word.approval
    asks = word.says is Says.REQUIRE_APPROVAL
    return (
        DECISIONS[word.says],
        word.reason,
        word.rule,
        _constraints_sent(word.constraints),
        tuple(Remediation(*msgspec.structs.astuple(each)) for each in word.remediations),
        ApprovalTerms(approval.quorum, approval.expires_s, approval.approvers) if asks else None,
        word.delay_s,
    )


def _constraints_sent(constraints: model.Constraints | None) -> Constraints | None:
    if constraints is None:
        return None
    budgets = constraints.budgets
    return Constraints(
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


def word_heard(word: Word) -> model.Word:
    """A decision that is not known denies."""
    found = _heard(word, word.policy_snapshot)
    if not word.apart:
        return found
    apart = tuple(
        model.Apart(frozenset(ids_heard(each.jobs)), _heard(each, word.policy_snapshot)) for each in word.apart
    )
    return msgspec.structs.replace(found, apart=apart)


def _heard(word: Word | Apart, snapshot: str) -> model.Word:
    says = SAYS.get(word.decision)
    if says is None:
        return model.Word(says=Says.DENY, reason=UNKNOWN, rule=word.rule_id, snapshot=snapshot)
    terms = word.approval
    return model.Word(
        says=says,
        reason=word.reason,
        rule=word.rule_id,
        snapshot=snapshot,
        constraints=_constraints_heard(word.constraints),
        remediations=tuple(model.Remediation(**msgspec.structs.asdict(each)) for each in word.remediations),
        approval=(
            model.ApprovalTerms(quorum=max(1, terms.quorum), expires_s=terms.expires_s, approvers=terms.approvers)
            if terms
            else model.ApprovalTerms()
        ),
        delay_s=word.delay_s,
    )


def _constraints_heard(constraints: Constraints | None) -> model.Constraints | None:
    if constraints is None:
        return None
    budgets = model.Budgets(
        max_runtime_ms=constraints.max_runtime_ms,
        max_retries=-1 if constraints.max_retries is None else constraints.max_retries,
        max_artifact_bytes=constraints.max_artifact_bytes,
        max_concurrent_jobs=constraints.max_concurrent_jobs,
    )
    return model.Constraints(
        budgets=budgets,
        sandbox=_table(constraints.sandbox_json),
        toolchain=_table(constraints.toolchain_json),
        diff=_table(constraints.diff_json),
        redaction_level=constraints.redaction_level,
    )


def _table(text: str) -> dict[str, object]:
    if not text:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.DecodeError:
        raise InvalidInput("The constraints of a word are no JSON.") from None
