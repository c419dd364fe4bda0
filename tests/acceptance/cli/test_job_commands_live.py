"""Job commands on a running installation: dry runs, dependencies, watching, retrying."""

import io
import json
from uuid import UUID

import pytest
import yaml
from rich.console import Console

from rota.cli.core.exit_codes import ExitCode
from rota.cli.core.output import make_table, shorten_ids
from rota.cli.jobs.logs import LogTail
from rota.cli.jobs.watch import JobProgressDisplay, layer_bar
from rota.engine.queries.log_cursor import FrameLogStream, LogCursor
from rota.engine.queries.logs import LogReader
from rota.policy import enabled_flag
from tests.support.commands import Terminal, rows
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm, hanging
from tests.support.waiting import until

ROW_COUNT = sql("""
SELECT (SELECT count(*) FROM rota.job) + (SELECT count(*) FROM rota.job_done) + (SELECT count(*) FROM rota.queues)
     + (SELECT count(*) FROM rota.outbox) + (SELECT count(*) FROM rota.idempotency_key)
     + (SELECT count(*) FROM rota.audit) + (SELECT count(*) FROM rota.placement_class)
     + (SELECT count(*) FROM rota.policy_word)""")


@pytest.fixture
async def farm(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as farm:
        await farm.show("default")
        yield farm


@pytest.fixture
def cli(monkeypatch, capsys, tmp_path, database_url, redis_url):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROTA_POSTGRES_URL", database_url)
    monkeypatch.setenv("ROTA_REDIS_URL", redis_url)
    return Terminal(monkeypatch, capsys)


async def submitted(cli, line):
    return json.loads(await cli.out(f"submit --json {line}"))["job"]


async def test_dry_run_reports_startable_frames_and_writes_nothing(farm, cli):
    await farm.worker(slots=3)
    before = await farm.database.value(ROW_COUNT)
    text = await cli.out("submit noop --frames 1-9 --cores 0.5 --key once --dry-run")
    assert "noop would be submitted to the show default, topic noop: 9 frames." in text
    assert "policy: allowed" in text
    assert "3 frames of 9 would start now." in text
    assert text.endswith("Nothing was changed.\n")
    data = json.loads(await cli.out("submit nope --dry-run --json"))
    assert (data["starts"], data["explained"]["reasons"][0]["code"]) == (0, "unknown_task")
    refused = await cli("submit noop --show nosuch --dry-run")
    assert (refused.status, "There is no show 'nosuch'" in refused.err) == (ExitCode.BAD_INPUT, True)
    assert await farm.database.value(ROW_COUNT) == before
    job = await submitted(cli, "noop --key once")
    assert json.loads(await cli.out("submit noop --key once --dry-run --json"))["already"] == job


async def test_dependent_job_waits_and_explain_names_its_dependency(farm, cli):
    await farm.worker()
    gate = hanging("x")
    first = await submitted(cli, "hang x --name water")
    await farm.running("x", 1)
    then = await submitted(cli, "noop --after water --after-failed run")
    text = await cli.out(f"explain {then}")
    assert "waiting_on_job: It waits for another job to end: water (" in text
    assert f"`rota explain {first}` shows why that job has not ended." in text
    gate.set()
    assert (await cli(f"job wait {then}")).status == ExitCode.OK


async def test_job_watch_prints_progress_and_exits_with_job_status(farm, cli):
    await farm.worker()
    gate = hanging("x")
    job = await submitted(cli, "hang x --frames 1-2")
    await farm.running("x", 2)
    result = await cli(f"job watch {job} --timeout 50ms")
    assert (result.status, result.out) == (ExitCode.NOT_ENDED, "")
    assert ": 0 of 2 frames ended, 2 on workers\nrota: Job " in result.err
    gate.set()
    assert (await cli(f"job watch {job}")).out.startswith("hang SUCCEEDED after ")
    failed = await submitted(cli, "boom")
    result = await cli(f"job watch {failed} -o yaml")
    assert (result.status, yaml.safe_load(result.out)["state"]) == (ExitCode.FAILED, "FAILED")


async def test_job_progress_display_draws_layer_bar_without_pace(farm, cli):
    await farm.worker(slots=2)
    hanging("x")
    job = await submitted(cli, "hang x --frames 1-8")
    await farm.running("x", 2)
    found = await farm.jobs.get(UUID(job))
    display = JobProgressDisplay()
    display.show(found)
    assert str(layer_bar(found.layers[0], 8)) == "██░░░░░░"
    assert display._pace_text(found) == ""


async def test_job_retry_creates_a_linked_job_of_failed_or_all_frames(farm, cli):
    await farm.worker()
    job = await submitted(cli, "boom --frames 1-3")
    assert await farm.ended(job) == "FAILED"
    data = json.loads(await cli.out(f"job retry {job[:20]} --json"))
    assert (data["retry_of"], data["frames"]) == (job, 3)
    assert (await farm.jobs.get(UUID(data["job"]))).labels["retry_of"] == job
    assert await farm.ended(data["job"]) == "FAILED"
    again = await cli(f"job retry {job}")
    assert (again.status, "has no failed frame to retry" in again.err) == (ExitCode.BAD_INPUT, True)
    assert "runs 3 frames of job" in await cli.out(f"job retry {job} --all")


async def test_job_cancel_by_name_requires_a_unique_live_job(farm, cli):
    for _ in range(2):
        await submitted(cli, "noop --name twin")
    result = await cli("job cancel twin")
    assert (result.status, "Several live jobs have the name 'twin'" in result.err) == (ExitCode.BAD_INPUT, True)
    alone = await submitted(cli, "noop --name alone --topic nowhere")
    assert f"Cancelled job {alone}" in await cli.out("job cancel alone")


async def test_wide_output_adds_labels_and_layer_ids(farm, cli):
    job = await submitted(cli, "noop --label shot=12")
    assert rows(await cli.out("jobs"))[0] == "job show name state frames age took reason"
    assert "shot=12" in await cli.out("jobs -o wide")
    assert [each["id"] for each in json.loads(await cli.out("jobs --label shot=12 --topic noop --json"))] == [job]
    assert "There is no matching job" in await cli.out("jobs --label shot=13")
    layer = (await farm.jobs.get(UUID(job))).layers[0].id
    assert str(layer) in await cli.out(f"job show {job} -o wide")
    assert "max cores 3" in await cli.out(f"layer set default {str(layer)[:30]} --max-cores 3")


def test_table_does_not_truncate_names_on_a_narrow_terminal():
    drawn = io.StringIO()
    console = Console(file=drawn, width=40)
    rows = [("default/default/render#1", "a long word that may be cut"), ("film/default/render#1", "another long word")]
    console.print(make_table(("queue", "what"), rows))
    assert "#1" in drawn.getvalue().replace("\n", "")
    assert "…" not in "".join(line[:18] for line in drawn.getvalue().splitlines())


def test_shorten_ids_keeps_ids_distinguishable():
    ids = ["01a1dfe3-7ca2-79ff-a3eb-61efd9180d8a", "01a1dfe3-7ca2-79fe-a3eb-61efd9180d8a"]
    assert shorten_ids(ids) == ["01a1dfe3-7ca2-79ff", "01a1dfe3-7ca2-79fe"]
    assert shorten_ids(ids[:1]) == ["01a1dfe3-7ca2"]


POLICY = """
rules:
  - {id: risky, match: {topics: [danger]}, decision: deny, reason: nothing is deleted here}
  - {id: costly, match: {topics: [night]}, decision: require_approval, reason: nights are expensive}
  - {id: busy, match: {topics: [limited]}, decision: throttle, velocity: {max_requests: 1, window: 1min, key: tenant}}
  - {id: all, decision: allow}
"""


@pytest.mark.parametrize(
    ("topic", "verdict", "state", "because"),
    [
        ("danger", "deny", "DENIED", "rule risky: nothing is deleted here"),
        ("night", "require_approval", "APPROVAL_REQUIRED", "rule costly: nights are expensive"),
        ("limited", "allow", "SCHEDULED", "unless the velocity limit busy is reached"),
        ("noop", "allow", "SCHEDULED", None),
    ],
)
async def test_dry_run_tells_what_the_policy_would_decide_and_writes_nothing(
    farm, cli, tmp_path, monkeypatch, topic, verdict, state, because
):
    (tmp_path / "policy.yaml").write_text(POLICY)
    monkeypatch.setenv("ROTA_POLICY_FILE", str(tmp_path / "policy.yaml"))
    before = await farm.database.value(ROW_COUNT)
    data = json.loads(await cli.out(f"submit noop --topic {topic} --dry-run --json"))
    assert (data["gate"]["verdict"], data["state"], data["gate"]["because"]) == (verdict, state, because)
    text = await cli.out(f"submit noop --topic {topic} --dry-run")
    assert (because or "policy: allowed") in text
    assert ("It would end as DENIED and run nothing." in text) == (verdict == "deny")
    assert await farm.database.value(ROW_COUNT) == before


async def test_dry_run_without_the_policy_of_the_servers_says_that_the_decision_is_pending(farm, cli):
    await enabled_flag.set_enabled(farm.database, asks=True)
    data = json.loads(await cli.out("submit noop --dry-run --json"))
    assert (data["gate"]["verdict"], data["state"]) == ("wait", "PENDING")


WORKFLOW = """
name: flow
steps:
  - {id: a, task: noop}
  - {id: b, task: noop, topic: danger, depends_on: [a], args: ["${steps.a.output}"]}
"""


async def test_workflow_dry_run_tells_what_the_policy_would_decide_about_each_step(farm, cli, tmp_path, monkeypatch):
    (tmp_path / "policy.yaml").write_text(POLICY)
    (tmp_path / "flow.yaml").write_text(WORKFLOW)
    line = "workflow run flow.yaml --dry-run"
    await enabled_flag.set_enabled(farm.database, asks=True)
    data = json.loads(await cli.out(f"{line} --json"))
    assert {step["gate"]["verdict"] for step in data["steps"]} == {"wait"}
    monkeypatch.setenv("ROTA_POLICY_FILE", str(tmp_path / "policy.yaml"))
    before = await farm.database.value(ROW_COUNT)
    data = json.loads(await cli.out(f"{line} --json"))
    assert [step["gate"]["verdict"] for step in data["steps"]] == ["allow", "deny"]
    text = await cli.out(line)
    assert "denied (rule risky: nothing is deleted here), without its input" in text
    assert await farm.database.value(ROW_COUNT) == before


async def test_job_logs_follow_until_the_job_ends(farm, cli, tmp_path):
    """The job waits until its first line was read, so the line arrived before the job ended."""
    await farm.worker()
    flag = tmp_path / "seen"
    script = f"echo first; while ! test -e {flag}; do :; done; echo last"
    data = json.loads((await cli(["submit", "--json", "--", "sh", "-c", script])).out)
    job = UUID(data["job"])
    logs = LogTail([LogCursor(LogReader(farm.database), FrameLogStream(job, None, None, None, "stdout"))])
    assert [piece.data for piece in await until(logs.read_new)] == [b"first\n"]
    flag.touch()
    assert await cli.out(f"job logs {job} -f") == "first\nlast\n"
    pieces = [json.loads(line) for line in (await cli.out(f"job logs {job} -f --json")).splitlines()]
    assert "".join(piece["text"] for piece in pieces) == "first\nlast\n"
    refused = await cli(f"job logs {job} -f --attempt 1")
    assert (refused.status, "omit --attempt" in refused.err) == (ExitCode.BAD_INPUT, True)
