"""A policy rule: which jobs it matches and its decision. Data and matching; no I/O.

A rule matches a job when every part of its `match` does and its `when` holds. A list matches if one of its entries
does, except `requires` and `labels`, where all entries must.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from rota.model.policy.decision import (
    ApprovalTerms,
    Constraints,
    PolicyDecision,
    PolicyEffect,
    PolicyRequest,
    Remediation,
)
from rota.policy.expressions import Condition
from rota.policy.globs import GlobSet

MatchPart = tuple[str, Callable[[PolicyRequest], bool]]

SINGLE_FIELDS: Final[Mapping[str, Callable[[PolicyRequest], str]]] = {
    "shows": lambda request: request.show,
    "tenants": lambda request: request.tenant or request.show,
    "topics": lambda request: request.topic,
    "capabilities": lambda request: request.capability,
    "actor_ids": lambda request: request.actor_id,
    "actor_types": lambda request: request.actor_type,
    "principals": lambda request: request.principal,
    "pack_ids": lambda request: request.pack_id,
    "adapter_ids": lambda request: request.adapter_id,
    "workflow_ids": lambda request: request.workflow_id,
    "folders": lambda request: request.folder,
    "depts": lambda request: request.dept,
}
"""Parts that match a single field of a job; a missing field is the empty string."""
LIST_FIELDS: Final[Mapping[str, Callable[[PolicyRequest], tuple[str, ...]]]] = {
    "risk_tags": lambda request: request.risk_tags,
    "tasks": lambda request: request.tasks,
    "env_names": lambda request: request.env_names,
}
"""Parts that match a list field: one of the job's values must match."""


class JobMatch:
    """A compiled `match:`, cheapest part first."""

    def __init__(self, names: Mapping[str, GlobSet], labels: Mapping[str, GlobSet], requires: tuple[str, ...]) -> None:
        self.names = dict(names)
        self.labels = tuple(labels)
        self.parts: tuple[MatchPart, ...] = tuple(
            [(part, _match_field(SINGLE_FIELDS[part], names[part])) for part in SINGLE_FIELDS if part in names]
            + [(part, _match_list(LIST_FIELDS[part], names[part])) for part in LIST_FIELDS if part in names]
            + (
                [("requires", lambda request: required.issubset(request.requires))]
                if (required := frozenset(requires))
                else []
            )
            + [(f"labels.{name}", _match_label(name, values)) for name, values in labels.items()]
        )

    def first_mismatch(self, request: PolicyRequest) -> str:
        """The first part that does not match; empty if all do."""
        for part, fits in self.parts:
            if not fits(request):
                return part
        return ""


def _match_field(field: Callable[[PolicyRequest], str], names: GlobSet) -> Callable[[PolicyRequest], bool]:
    return lambda request: names.matches(field(request))


def _match_list(fields: Callable[[PolicyRequest], tuple[str, ...]], names: GlobSet) -> Callable[[PolicyRequest], bool]:
    return lambda request: names.matches_any(fields(request))


def _match_label(name: str, values: GlobSet) -> Callable[[PolicyRequest], bool]:
    return lambda request: name in request.labels and values.matches(request.labels[name])


class Velocity(msgspec.Struct, frozen=True):
    """Exceeded by more than `most` jobs with the same `key` within `window_s`."""

    most: int
    window_s: float
    key: tuple[str, ...] = ()

    def value(self, request: PolicyRequest) -> str:
        """The value of the key for a job."""
        return msgspec.json.encode([_key_part(request, part) for part in self.key]).decode()


def _key_part(request: PolicyRequest, part: str) -> str:
    if part.startswith("labels."):
        return request.labels.get(part.removeprefix("labels."), "")
    if part == "tenant":
        return request.tenant or request.show
    return str(getattr(request, part))


class PolicyRule(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    line: int
    says: PolicyEffect
    match: JobMatch
    when: Condition | None = None
    velocity: Velocity | None = None
    reason: str = ""
    constraints: Constraints | None = None
    remediations: tuple[Remediation, ...] = ()
    approval: ApprovalTerms = ApprovalTerms()
    delay_s: float = 0.0

    def to_decision(self, snapshot: str) -> PolicyDecision:
        return PolicyDecision(
            says=self.says,
            reason=self.reason or f"rule {self.id}",
            rule=self.id,
            snapshot=snapshot,
            constraints=self.constraints,
            remediations=self.remediations,
            approval=self.approval,
            delay_s=self.delay_s,
        )


class PolicyRules(msgspec.Struct, frozen=True):
    """The rules of a file for jobs."""

    ordered: tuple[PolicyRule, ...] = ()
    default: PolicyEffect = PolicyEffect.DENY


class PolicyDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed policy file: rules for jobs, and the sections of other modules by name."""

    source: str
    rules: PolicyRules
    fail_mode: str | None = None
    sections: dict[str, Any] = {}
