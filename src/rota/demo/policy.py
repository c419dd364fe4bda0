"""Policy scenario of the demo: a denied job, and a job that waits for an approval."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from rota.demo.stack import ACTOR, DemoSnapshot, DemoStack
from rota.demo.view import DemoReport
from rota.model.approvals import Voter
from rota.model.errors import SelfApprovalDenied
from rota.model.identity.principals import Principal
from rota.model.job_states import JobState

WIPED, PUBLISHED = "wipe", "publish"
POLICY: Final = f"""\
rules:
  - id: nothing-is-wiped
    match: {{topics: [{WIPED}]}}
    decision: deny
    reason: Disks of running workers are never wiped
  - id: publishing-needs-two-eyes
    match: {{topics: [{PUBLISHED}]}}
    decision: require_approval
    reason: Publishing cannot be undone
  - id: everything-else
    decision: allow
"""

WaitUntil = Callable[[Callable[[DemoSnapshot], bool], str], Awaitable[DemoSnapshot]]


async def run_policy_scenario(cluster: DemoStack, report: DemoReport, until: WaitUntil) -> None:
    """Expects both jobs to be submitted."""
    snapshot = await until(lambda snapshot: snapshot.jobs[WIPED].state.terminal, "the denial")
    decision = snapshot.jobs[WIPED].policy
    report.check(
        snapshot.jobs[WIPED].state is JobState.DENIED and decision is not None,
        f"wipe is denied and never ran: rule {decision.rule if decision is not None else '?'}",
    )
    await until(lambda snapshot: snapshot.jobs[PUBLISHED].state is JobState.APPROVAL_REQUIRED, "the approval request")
    report.check(await _submitter_is_refused(cluster), "publish waits for an approval; its submitter cannot approve it")
    approval = await cluster.replica.engine.approver.find(str(cluster.submitted[PUBLISHED]))
    voter = Voter(Principal("dora"), "demo:dora", is_operator=True)
    granted = await cluster.replica.engine.approver.approve(approval, voter, "reviewed")
    await until(lambda snapshot: snapshot.jobs[PUBLISHED].state is JobState.SUCCEEDED, "the end of publish")
    report.check(granted.changed, "dora approved it: the policy decides again, and it runs")


async def _submitter_is_refused(cluster: DemoStack) -> bool:
    approver = cluster.replica.engine.approver
    approval = await approver.find(str(cluster.submitted[PUBLISHED]))
    try:
        await approver.approve(approval, Voter(Principal(ACTOR), ACTOR, is_operator=True))
    except SelfApprovalDenied:
        return True
    return False
