"""Policy requests and decisions. No I/O.

A policy sees a job as submitted (`PolicyRequest`) and nothing that changes later, so the same job under the same
snapshot always gets the same decision, and equal jobs are checked once. Only velocity limits keep counts.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import msgspec

from rota.model.ids import JobId


class PolicyEffect(StrEnum):
    """Effect of a decision on a job; an unknown value means DENY."""

    ALLOW = "ALLOW"
    ALLOW_WITH_CONSTRAINTS = "ALLOW_WITH_CONSTRAINTS"
    REQUIRE_APPROVAL = "REQUIRE_APPROVAL"
    THROTTLE = "THROTTLE"
    DENY = "DENY"


class PolicyRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything rules may depend on. Environment values and inputs are excluded: they may be secrets."""

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
    """Per frame, of the layer that requests the most."""
    gpus: int = 0
    input_bytes: int = 0
    deadline_ms: int = 0


class PolicyRequestGroup(msgspec.Struct, frozen=True):
    """Jobs with the same request. Their ids are for velocity limits, which count each job once."""

    asked: PolicyRequest
    jobs: tuple[JobId, ...]


class PolicyBudgets(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """0: no limit."""

    max_runtime_ms: int = 0
    """Of one attempt of a frame."""
    max_retries: int = -1
    """-1: as the job requests."""
    max_artifact_bytes: int = 0
    """Of all artifacts of one frame."""
    max_concurrent_jobs: int = 0
    """Concurrent jobs of the show."""


class Constraints(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Conditions of running a job: servers and workers enforce the budgets, the rest is passed to the frames."""

    budgets: PolicyBudgets = PolicyBudgets()
    sandbox: dict[str, object] = {}
    toolchain: dict[str, object] = {}
    diff: dict[str, object] = {}
    redaction_level: str = ""


class Remediation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """An alternative submission that the policy would accept."""

    id: str
    title: str = ""
    summary: str = ""
    replacement_topic: str = ""
    replacement_capability: str = ""
    add_labels: dict[str, str] = {}
    remove_labels: tuple[str, ...] = ()


class ApprovalTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Who must approve, and by when."""

    quorum: int = 1
    expires_s: float = 0.0
    """After this time the job is denied; 0: it waits indefinitely."""
    approvers: tuple[str, ...] = ()
    """Names of keys that may approve; empty: every operator of the show."""


class PolicyDecision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The decision about one request, and its origin."""

    says: PolicyEffect
    reason: str = ""
    """The rule's explanation, one sentence."""
    rule: str = ""
    """Empty: no rule matched, the default decided."""
    snapshot: str = ""
    """Hash of the policy's content. Empty: no policy was evaluated (fail-open)."""
    constraints: Constraints | None = None
    remediations: tuple[Remediation, ...] = ()
    approval: ApprovalTerms = ApprovalTerms()
    delay_s: float = 0.0
    """For THROTTLE: time until the next check; 0: `scheduler.safety_throttle_delay`."""
    apart: tuple[DecisionOverride, ...] = ()
    """Different decisions for single jobs of the request: those that a velocity limit still admitted."""

    def for_job(self, job: JobId) -> PolicyDecision:
        """The decision for one job of the request."""
        return next((override.word for override in self.apart if job in override.jobs), self)


class DecisionOverride(msgspec.Struct, frozen=True):
    jobs: frozenset[JobId]
    word: PolicyDecision


class Kernel(Protocol):
    """Evaluates the policy: in this process, or over gRPC."""

    async def check(self, questions: list[PolicyRequestGroup]) -> list[PolicyDecision]:
        """One decision per request, in order; `PolicyDecision.for_job` applies it to a job. Raises `Unavailable`."""
        ...
