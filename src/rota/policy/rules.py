"""A rule: for which jobs it is, and what it says of them. Data, and how it is compared; no I/O.

A rule is for a job when every part of its `match` is, and then its `when` holds. Parts that are lists are met by one of
their entries, except `requires` and `labels`, of which every one must be there.
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
    "shows": lambda asked: asked.show,
    "tenants": lambda asked: asked.tenant or asked.show,
    "topics": lambda asked: asked.topic,
    "capabilities": lambda asked: asked.capability,
    "actor_ids": lambda asked: asked.actor_id,
    "actor_types": lambda asked: asked.actor_type,
    "principals": lambda asked: asked.principal,
    "pack_ids": lambda asked: asked.pack_id,
    "adapter_ids": lambda asked: asked.adapter_id,
    "workflow_ids": lambda asked: asked.workflow_id,
    "folders": lambda asked: asked.folder,
    "depts": lambda asked: asked.dept,
}
"""Parts that look at one word of a job; a word that it does not have is the empty one."""
LIST_FIELDS: Final[Mapping[str, Callable[[PolicyRequest], tuple[str, ...]]]] = {
    "risk_tags": lambda asked: asked.risk_tags,
    "tasks": lambda asked: asked.tasks,
    "env_names": lambda asked: asked.env_names,
}
"""Parts that look at a list: one of the job's words must be among those listed."""


class JobMatch:
    """What `match:` says, cheapest part first."""

    def __init__(self, names: Mapping[str, GlobSet], labels: Mapping[str, GlobSet], requires: tuple[str, ...]) -> None:
        self.names = dict(names)
        self.labels = tuple(labels)
        self.parts: tuple[MatchPart, ...] = tuple(
            [(part, _match_field(SINGLE_FIELDS[part], names[part])) for part in SINGLE_FIELDS if part in names]
            + [(part, _match_list(LIST_FIELDS[part], names[part])) for part in LIST_FIELDS if part in names]
            + ([("requires", lambda asked: wanted.issubset(asked.requires))] if (wanted := frozenset(requires)) else [])
            + [(f"labels.{name}", _match_label(name, values)) for name, values in labels.items()]
        )

    def first_mismatch(self, asked: PolicyRequest) -> str:
        """The first part that does not fit; empty: all do."""
        for part, fits in self.parts:
            if not fits(asked):
                return part
        return ""


def _match_field(word: Callable[[PolicyRequest], str], names: GlobSet) -> Callable[[PolicyRequest], bool]:
    return lambda asked: names.matches(word(asked))


def _match_list(words: Callable[[PolicyRequest], tuple[str, ...]], names: GlobSet) -> Callable[[PolicyRequest], bool]:
    return lambda asked: names.matches_any(words(asked))


def _match_label(name: str, values: GlobSet) -> Callable[[PolicyRequest], bool]:
    return lambda asked: name in asked.labels and values.matches(asked.labels[name])


class Velocity(msgspec.Struct, frozen=True):
    """More than `most` jobs within `window_s` that have the same `key`."""

    most: int
    window_s: float
    key: tuple[str, ...] = ()

    def value(self, asked: PolicyRequest) -> str:
        """What a job is counted under."""
        return msgspec.json.encode([_key_part(asked, part) for part in self.key]).decode()


def _key_part(asked: PolicyRequest, part: str) -> str:
    if part.startswith("labels."):
        return asked.labels.get(part.removeprefix("labels."), "")
    if part == "tenant":
        return asked.tenant or asked.show
    return str(getattr(asked, part))


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
    """What a file says about jobs."""

    ordered: tuple[PolicyRule, ...] = ()
    default: PolicyEffect = PolicyEffect.DENY


class PolicyDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A policy file, read: what it says about jobs, and by their names the sections that others read."""

    source: str
    rules: PolicyRules
    fail_mode: str | None = None
    sections: dict[str, Any] = {}
