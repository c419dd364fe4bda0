"""The part of the demo that a policy plays: a job that is denied, and one that waits until somebody approves it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from rota.demo.stack import ACTOR, DemoSnapshot, DemoStack
from rota.demo.view import DemoReport
from rota.model.approvals import Voter
from rota.model.errors import SelfApprovalDenied
from rota.model.job_states import JobState

WIPED, PUBLISHED = "wipe", "publish"
POLICY: Final = f"""\
rules:
  - id: nothing-is-wiped
    match: {{topics: [{WIPED}]}}
    decision: deny
    reason: Nobody wipes the disks of a farm that runs
  - id: publishing-needs-two-eyes
    match: {{topics: [{PUBLISHED}]}}
    decision: require_approval
    reason: What is published cannot be taken back
  - id: everything-else
    decision: allow
"""

WaitUntil = Callable[[Callable[[DemoSnapshot], bool], str], Awaitable[DemoSnapshot]]


async def run_policy_scenario(farm: DemoStack, story: DemoReport, until: WaitUntil) -> None:
    """Both jobs were submitted."""
    seen = await until(lambda seen: seen.jobs[WIPED].state.terminal, "the denial")
    said = seen.jobs[WIPED].policy
    story.check(
        seen.jobs[WIPED].state is JobState.DENIED and said is not None,
        f"wipe is denied and never ran: rule {said.rule if said is not None else '?'}",
    )
    await until(lambda seen: seen.jobs[PUBLISHED].state is JobState.APPROVAL_REQUIRED, "the demand for an approval")
    story.check(await _submitter_is_refused(farm), "publish waits for an approval, which who submitted it cannot give")
    asked = await farm.replica.engine.approver.find(str(farm.submitted[PUBLISHED]))
    said_by = Voter("dora", "demo:dora", is_operator=True)
    granted = await farm.replica.engine.approver.approve(asked, said_by, "looked at")
    await until(lambda seen: seen.jobs[PUBLISHED].state is JobState.SUCCEEDED, "the end of publish")
    story.check(granted.changed, "dora has approved it: the policy is asked once more, and it runs")


async def _submitter_is_refused(farm: DemoStack) -> bool:
    approver = farm.replica.engine.approver
    asked = await approver.find(str(farm.submitted[PUBLISHED]))
    try:
        await approver.approve(asked, Voter(ACTOR, ACTOR, is_operator=True))
    except SelfApprovalDenied:
        return True
    return False
