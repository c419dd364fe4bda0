"""Applies a remediation that the policy suggests to a denied job: a safer topic, capability or labels. No I/O."""

from __future__ import annotations

from typing import Final
from uuid import UUID

import msgspec
from msgspec.structs import replace

from rota.engine.resubmission.plan import RETRY_OF
from rota.model.errors import InvalidInput
from rota.model.jobs.submission import decode_details, encode_details
from rota.model.jobs.validation import (
    PLACEMENT_LABEL_PREFIXES,
    TASK_CONSTRAINT_PREFIX,
    PlacementSpec,
    ValidatedLayer,
    ValidatedSubmission,
)
from rota.model.policy.decision import PolicyDecision, Remediation

REMEDIATION_OF: Final = "remediation_of"
REMEDIATION_ID: Final = "remediation_id"


def select_remediation(decision: PolicyDecision | None, remediation_id: str) -> Remediation:
    """The remediation with that id; without an id, the only one."""
    offered = decision.remediations if decision is not None else ()
    found = [each for each in offered if each.id == remediation_id] if remediation_id else list(offered)
    if len(found) == 1:
        return found[0]
    if not offered:
        raise InvalidInput("The policy suggests no remediation: change the job or the policy, and submit it again.")
    names = ", ".join(each.id for each in offered)
    raise InvalidInput(f"No suggested remediation was selected: choose one of {names}.", remediations=names)


def apply_remediation(plan: ValidatedSubmission, remedy: Remediation, old: UUID) -> ValidatedSubmission:
    """`plan` is the unchanged submission of the old job."""
    labels: dict[str, str] = msgspec.json.decode(plan.labels) if plan.labels else {}
    kept = {name: value for name, value in labels.items() if name not in (*remedy.remove_labels, RETRY_OF)}
    labels = {**kept, **remedy.add_labels, REMEDIATION_OF: str(old), REMEDIATION_ID: remedy.id}
    details = decode_details(plan.details)
    details = replace(details, capability=remedy.replacement_capability or details.capability)
    topic = remedy.replacement_topic or plan.topic
    layers = tuple(_remediated_layer(each, topic, labels) for each in plan.layers)
    text = msgspec.json.encode(labels).decode()
    return replace(plan, topic=topic, labels=text, details=encode_details(details), layers=layers, like=None)


def _remediated_layer(layer: ValidatedLayer, topic: str, labels: dict[str, str]) -> ValidatedLayer:
    tasks = [pair for pair in layer.place.labels if pair[0].startswith(TASK_CONSTRAINT_PREFIX)]
    constraints = [pair for pair in labels.items() if pair[0].startswith(PLACEMENT_LABEL_PREFIXES)]
    place: PlacementSpec = replace(
        layer.place,
        topic=topic,
        labels=tuple(sorted({**dict(constraints), **dict(tasks)}.items())),
        preferred_pool=labels.get("preferred_pool", ""),
        preferred_worker=labels.get("preferred_worker_id", ""),
    )
    return replace(layer, place=place, digest=place.digest)
