"""docs/howto/approvals.md: its policy, workflow and commands are valid and mean what the page says."""

import re
from pathlib import Path

import typer

from rota.cli.main import app
from rota.model.policy.decision import ApprovalTerms, PolicyEffect, PolicyRequest, PolicyRequestGroup
from rota.policy.evaluate import CompiledPolicy
from rota.policy.kernel import LocalKernel
from rota.policy.loader import parse, snapshot_id
from rota.policy.snapshots import PolicySnapshots
from rota.workflow.yaml_loader import parse as parse_workflow

PAGE = (Path(__file__).parents[3] / "docs/howto/approvals.md").read_text()


async def test_page_policy_requires_the_documented_approvals():
    text, _ = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    kernel = LocalKernel(PolicySnapshots(CompiledPolicy(parse(text), snapshot_id(text))))
    requests = [PolicyRequestGroup(PolicyRequest(show="film", topic=topic), ()) for topic in ("publish", "render")]
    publish, render = await kernel.check(requests)
    assert (publish.says, render.says) == (PolicyEffect.REQUIRE_APPROVAL, PolicyEffect.ALLOW)
    assert publish.approval == ApprovalTerms(quorum=2, expires_s=86_400.0, approvers=("ann", "bob", "cleo"))


def test_page_workflow_is_valid():
    _, text = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    spec = parse_workflow(f"name: ship\n{text}")
    assert spec.steps[1].approval.approvers == ("bob", "cleo")


def test_page_lists_every_approvals_command():
    group = typer.main.get_command(app).commands["approvals"]
    documented = set(re.findall(r"^rota approvals (\w+)", PAGE, re.MULTILINE))
    assert documented == set(group.commands)
