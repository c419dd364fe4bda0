"""docs/howto/approvals.md: its policy is one, and means what the page says."""

import re
from pathlib import Path

import typer

from rota.cli.app import app
from rota.model.policy import ApprovalTerms, Asked, Question, Says
from rota.policy.evaluate import Policy
from rota.policy.kernel import LocalKernel
from rota.policy.load import parse, snapshot_of
from rota.policy.snapshots import Snapshots
from rota.workflow.reading import parse as parse_workflow

PAGE = (Path(__file__).parents[2] / "docs/howto/approvals.md").read_text()


async def test_its_policy_asks_for_what_it_says():
    text, _ = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    kernel = LocalKernel(Snapshots(Policy(parse(text), snapshot_of(text))))
    questions = [Question(Asked(show="film", topic=topic), ()) for topic in ("publish", "render")]
    publish, render = await kernel.check(questions)
    assert (publish.says, render.says) == (Says.REQUIRE_APPROVAL, Says.ALLOW)
    assert publish.approval == ApprovalTerms(quorum=2, expires_s=86_400.0, approvers=("ann", "bob", "cleo"))


def test_its_workflow_is_one():
    _, text = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    spec = parse_workflow(f"name: ship\n{text}")
    assert spec.steps[1].approval.approvers == ("bob", "cleo")


def test_its_commands_are_there():
    group = typer.main.get_command(app).commands["approvals"]
    named = set(re.findall(r"^rota approvals (\w+)", PAGE, re.MULTILINE))
    assert named == set(group.commands)
