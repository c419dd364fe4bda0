"""Generates docs/reference/reasons.md from the reason codes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rota.model.attempt_codes import AttemptCode
from rota.model.reasons import Reason, Tier

_HEAD = """\
# Reasons

Why a job or a run waits, or ended other than by its own result. The same code is the reason of a job, the code in
`rota explain`, the label `reason` of metrics and the reason of a dead letter. `tools.docs.reasons_reference` generates
this page from the code; a test compares the two. Words in capitals are placeholders; `rota explain` inserts the names.

Waiting reasons have tiers, and a higher tier is shown first: more capacity does not help a job that no pool may run.
"""

_CODES = """\
The code of one attempt of a frame, in `rota job show` and in the frames of the HTTP API. It is also the reason of the
dead letter of a frame that failed for good. An attempt that the servers ended has a code of the tables above instead:
`worker_lost`, `dispatch_timeout`, `running_timeout`, `cancelled`."""

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
    parts.append("\n".join(["## An attempt failed", "", _CODES, "", *_codes(), ""]))
    return "\n".join(parts)


def _codes() -> Iterator[str]:
    yield "| code | meaning | then |"
    yield "|---|---|---|"
    for code in AttemptCode:
        yield f"| `{code}` | {code.meaning} | {'dispatched again' if code.returned else 'retried, or failed'} |"


def _table(reasons: Iterable[Reason]) -> Iterator[str]:
    yield "| reason | meaning | remedy |"
    yield "|---|---|---|"
    for reason in reasons:
        yield f"| `{reason}` | {reason.meaning} | {reason.remedy(burst='burst', what='cores')} |"
