"""Generates docs/reference/reasons.md from the reason codes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rota.model.reasons import Reason, Tier

_HEAD = """\
# Reasons

Why a job or a run waits, or ended other than by its own result. The same code is the reason of a job, the code in
`rota explain`, the label `reason` of metrics and the reason of a dead letter. `tools.docs.reasons_reference` generates
this page from the code; a test compares the two. Words in capitals are placeholders; `rota explain` inserts the names.

Waiting reasons have tiers, and a higher tier is shown first: more capacity does not help a job that no pool may run.
"""

_TIERS = {
    Tier.MISCONFIGURED: "It can never start with the current configuration.",
    Tier.BLOCKED: "Something must happen first, whatever capacity there is.",
    Tier.QUOTA: "The quota of its show, folder, department or of the job itself is used up.",
    Tier.CAPACITY: "No worker has capacity for it.",
    Tier.ORDER: "Other work goes first.",
    Tier.SYSTEM: "Rota itself cannot start anything now.",
}


def page() -> str:
    """The page as Markdown."""
    parts = [_HEAD]
    for tier in Tier:
        of_tier = [reason for reason in Reason if reason.tier is tier]
        parts.append("\n".join([f"## It waits: {tier}", "", _TIERS[tier], "", *_table(of_tier), ""]))
    ends = [reason for reason in Reason if not reason.waits and reason is not Reason.ENDING]
    intro = "The reason ended something: an attempt to dispatch or to run, or the job."
    parts.append("\n".join(["## It ended", "", intro, "", *_table(ends), ""]))
    return "\n".join(parts)


def _table(reasons: Iterable[Reason]) -> Iterator[str]:
    yield "| reason | meaning | remedy |"
    yield "|---|---|---|"
    for reason in reasons:
        yield f"| `{reason}` | {reason.meaning} | {reason.remedy(burst='burst', what='cores')} |"
