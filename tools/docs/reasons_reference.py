"""Generates docs/reference/reasons.md from the reason codes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rota.model.reasons import Reason, Tier

_HEAD = """\
# Reasons

Why a job or a run waits, or ended otherwise than by its own doing. The same word is the reason of a job, the code in
`rota explain`, the label `reason` of metrics and the reason of a dead letter. This page is made from the code by
`tools.docs.reasons_reference`; a test compares the two. Words in capitals stand for names; `rota explain` puts them in.

Reasons to wait come in tiers, and those of a higher tier are told first: more room is of no use to a job that no pool
may run.
"""

_TIERS = {
    Tier.MISCONFIGURED: "It can never start as things are set up.",
    Tier.BLOCKED: "Somebody or something has to happen first, whatever room there is.",
    Tier.QUOTA: "What its show, folder, department, or it itself may use is used up.",
    Tier.CAPACITY: "No worker has room for it.",
    Tier.ORDER: "There is a turn for everything, and others come before it.",
    Tier.SYSTEM: "Rota itself cannot start anything now.",
}


def page() -> str:
    """The page as Markdown."""
    parts = [_HEAD]
    for tier in Tier:
        of_tier = [reason for reason in Reason if reason.tier is tier]
        parts.append("\n".join([f"## It waits: {tier}", "", _TIERS[tier], "", *_table(of_tier), ""]))
    ends = [reason for reason in Reason if not reason.waits and reason is not Reason.ENDING]
    intro = "Something ended for this: an attempt to dispatch or to run, or the job."
    parts.append("\n".join(["## It ended", "", intro, "", *_table(ends), ""]))
    return "\n".join(parts)


def _table(reasons: Iterable[Reason]) -> Iterator[str]:
    yield "| reason | meaning | what helps |"
    yield "|---|---|---|"
    for reason in reasons:
        yield f"| `{reason}` | {reason.meaning} | {reason.remedy(burst='burst', what='cores')} |"
