"""What a policy is asked, and what it answers. No I/O.

A policy looks at a job as it was submitted (`Asked`) and at nothing that changes afterwards, so the same job under the
same snapshot always gets the same word, and jobs that are alike are asked about once. Only a velocity limit counts.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import msgspec

from rota.model.ids import JobId


class PolicyEffect(StrEnum):
    """What a policy says of a job; anything else that is heard means DENY."""

    ALLOW = "ALLOW"
    ALLOW_WITH_CONSTRAINTS = "ALLOW_WITH_CONSTRAINTS"
    REQUIRE_APPROVAL = "REQUIRE_APPROVAL"
    THROTTLE = "THROTTLE"
    DENY = "DENY"


class PolicyRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that rules may look at. Values of the environment and inputs are not among it: they may be secrets."""

    show: str
    topic: str
    priority: int = 5
    folder: str = ""
    dept: str = ""
    capability: str = ""
    risk_tags: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    actor_id: str = ""
    actor_type: str = ""
    tenant: str = ""
    principal: str = ""
    pack_id: str = ""
    adapter_id: str = ""
    workflow_id: str = ""
    tasks: tuple[str, ...] = ()
    """Of its layers: the task, or the program of a command."""
    env_names: tuple[str, ...] = ()
    frames: int = 1
    cores: float = 1.0
    """Of the layer that asks for most, per frame."""
    gpus: int = 0
    input_bytes: int = 0
    deadline_ms: int = 0


class PolicyRequestGroup(msgspec.Struct, frozen=True):
    """Jobs that are alike in all that rules look at. Their ids are for velocity limits, which count each job once."""

    asked: PolicyRequest
    jobs: tuple[JobId, ...]


class PolicyBudgets(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """0 is no limit."""

    max_runtime_ms: int = 0
    """Of one attempt of a frame."""
    max_retries: int = -1
    """-1: as the job asks."""
    max_artifact_bytes: int = 0
    """Of all that one frame leaves behind."""
    max_concurrent_jobs: int = 0
    """Jobs of the show that run at a time."""


class Constraints(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Under which a job may run: budgets are enforced by servers and workers, the rest is told to what runs."""

    budgets: PolicyBudgets = PolicyBudgets()
    sandbox: dict[str, object] = {}
    toolchain: dict[str, object] = {}
    diff: dict[str, object] = {}
    redaction_level: str = ""


class Remediation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What to submit instead."""

    id: str
    title: str = ""
    summary: str = ""
    replacement_topic: str = ""
    replacement_capability: str = ""
    add_labels: dict[str, str] = {}
    remove_labels: tuple[str, ...] = ()


class ApprovalTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Who must agree, and by when."""

    quorum: int = 1
    expires_s: float = 0.0
    """After it the job is denied; 0: it waits for ever."""
    approvers: tuple[str, ...] = ()
    """Names of keys that may; empty: every operator of the show."""


class PolicyDecision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the policy says of one question, and by what."""

    says: PolicyEffect
    reason: str = ""
    """One sentence of the rule's, for people."""
    rule: str = ""
    """Empty: no rule matched, the default decided."""
    snapshot: str = ""
    """Of the policy that spoke: a hash of its content. Empty: nobody was asked (fail-open)."""
    constraints: Constraints | None = None
    remediations: tuple[Remediation, ...] = ()
    approval: ApprovalTerms = ApprovalTerms()
    delay_s: float = 0.0
    """Of THROTTLE, until it is asked again; 0: `scheduler.safety_throttle_delay`."""
    apart: tuple[DecisionOverride, ...] = ()
    """Jobs of the question of which something else is said: those that a velocity limit still had places for."""

    def for_job(self, job: JobId) -> PolicyDecision:
        """What is said of this job of the question."""
        return next((apart.word for apart in self.apart if job in apart.jobs), self)


class DecisionOverride(msgspec.Struct, frozen=True):
    jobs: frozenset[JobId]
    word: PolicyDecision


class Kernel(Protocol):
    """Who decides: in this process, or over gRPC."""

    async def check(self, questions: list[PolicyRequestGroup]) -> list[PolicyDecision]:
        """A word for each, in their order; `Word.of` says it of a job. Raises `Unavailable` when there is none."""
        ...
