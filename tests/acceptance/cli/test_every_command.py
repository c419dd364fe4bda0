"""Every command once in text and once in JSON on a running installation; the JSON must match its type."""

import json
import re
import sys

import msgspec
import pytest
import typer

from rota import runtime
from rota.cli.main import app
from rota.engine.admission.policy_queries import JobPolicyExplanation, PolicySimulation
from rota.model.access import Role
from rota.model.policy.decision import PolicyEffect, Remediation
from rota.policy import policy_tests
from rota.policy.lint import PolicyLintReport
from rota.server import services
from tests.acceptance import answers as a
from tests.support.agents import HOUR_MS, Pod, RunRecorder, every, history
from tests.support.api import Api
from tests.support.commands import Terminal
from tests.support.kernels import TABLE, Table, decision
from tests.support.outputs import an_output
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm, hanging
from tests.support.waiting import until

TESTED_ELSEWHERE = {"up", "down", "server", "kernel", "worker", "demo", "events"}
"""Commands that run a process or need an API, and have tests of their own."""
FAILED = sql("SELECT count(*) FROM rota.done_entries")
LOGGED = sql("SELECT EXISTS (SELECT FROM rota.frame_log WHERE data = 'hello\n')")
RUN_ENDED = sql("SELECT ts_ended IS NOT NULL FROM rota.workflow_run WHERE pk_run = $1::uuid")
FOUR_APPROVALS = sql("SELECT count(*) = 4 FROM rota.approval")

# The command line for text, the one for JSON, and the type of the JSON. `{name}` refers to an object created before.
QUOTA = [
    ("config show", "config show", list[a.Setting]),
    ("db status", "db status", list[a.MigrationStatus]),
    ("db migrate --dry-run", "db migrate --dry-run", a.Migrated),
    ("show create duck", "show create swan --managed", a.Change),
    ("show rename duck drake", "show rename drake duck", a.Change),
    ("show set duck --max-jobs 5", "show set duck --max-jobs 6", a.Change),
    ("show set-managed duck true", "show set-managed duck false", a.Change),
    ("pool create gpu", "pool create spare", a.Change),
    ("pool rename spare extra", "pool rename extra spare", a.Change),
    ("sub create duck gpu --size 1 --burst 150%", "sub create swan gpu --size 1 --burst 2", a.Change),
    ("sub set duck gpu --burst 3", "sub set swan gpu --gpu-burst 4", a.Change),
    ("folder create duck shots", "folder create duck assets --max-cores 2", a.Change),
    ("folder set duck shots --max-cores 8", "folder set duck shots --max-gpus 8", a.Change),
    ("folder rename duck assets props", "folder rename duck props assets", a.Change),
    ("dept create fx", "dept create comp", a.Change),
    ("dept rename comp roto", "dept rename roto comp", a.Change),
    ("dept add duck fx", "dept add duck comp --min-cores 1", a.Change),
    ("dept set duck fx --max-cores 8", "dept set duck fx --max-gpus 1", a.Change),
    ("show list", "show list", list[a.ShowLine]),
    ("show info duck", "show info duck", a.ShowInfo),
    ("pool list", "pool list", list[a.Pool]),
    ("sub list duck", "sub list duck", list[a.Share]),
    ("folder list duck", "folder list duck", list[a.Caps]),
    ("dept list", "dept list", list[a.Dept]),
    ("dept list duck", "dept list duck", list[a.Caps]),
    ("dept remove duck fx", "dept remove duck comp", a.Change),
    ("dept delete fx", "dept delete comp", a.Change),
    ("folder delete duck shots", "folder delete duck assets", a.Change),
    ("sub delete duck gpu", "sub delete swan gpu", a.Change),
    ("pool delete gpu", "pool delete spare", a.Change),
    ("show delete duck", "show delete swan", a.Change),
]
OTHER = [
    ("pool topics", "pool topics", list[a.Topic]),
    ("pool map * local", "pool map more local", a.Mapped),
    ("pool set local --placement pack", "pool set local --placement fit", a.PoolPlacement),
    ("pool drain local", "pool drain local", a.PoolStatus),
    ("pool activate local", "pool activate local", a.PoolStatus),
    ("pool unmap more", "pool unmap *", a.Unmapped),
    ("keys create ann --role viewer", "keys create bob --role submitter --show default", a.NewKey),
    ("keys list", "keys list", list[a.Key]),
    ("keys revoke ann", "keys revoke bob", a.RevokedKey),
    ("principals create cleo", "principals create dora", a.Principal),
    ("principals list", "principals list", list[a.Principal]),
    ("principals disable cleo", "principals disable dora", a.DisabledPrincipal),
    ("workers", "workers", list[a.Worker]),
    ("submit noop --dry-run", "submit noop --dry-run", a.DryRun),
    ("submit noop --key one", "submit noop --key one", a.Submitted),
]
RUNNING = [
    ("jobs", "jobs", list[a.JobLine]),
    ("job show {hang}", "job show {hang}", a.Job),
    ("explain {hang}", "explain {hang}", a.JobExplanation),
    ("job set default {hang} --max-cores 4", "job set default {hang} --max-gpus 4", a.Change),
    ("layer set default {layer} --max-cores 4", "layer set default {layer} --max-gpus 4", a.Change),
    ("top --once", "top --once", a.Top),
    ("ledger watch --once", "ledger watch --once", list[a.Standing]),
    ("ledger audit", "ledger audit", a.LedgerAudited),
    ("queue list", "queue list", list[a.QueueLine]),
    ("queue counts", "queue counts", list[a.QueueCounts]),
    ("queue pause {queue}", "queue pause {queue}", a.Paused),
    ("queue resume {queue}", "queue resume {queue}", a.Paused),
    ("queue storage", "queue storage", a.Storage),
    ("doctor", "doctor", a.Doctor),
    ("status", "status", a.LocalStatus),
    ("job cancel {hang}", "job cancel {hang}", list[a.Cancelled]),
]
ENDED = [
    ("job wait {echo}", "job wait {echo}", a.Ended),
    ("job watch {echo}", "job watch {echo}", a.Ended),
    ("job logs {command}", "job logs {command}", list[a.LogPiece]),
    ("job results {echo}", "job results {echo}", list[a.Result]),
    ("job artifacts {echo}", "job artifacts {echo}", list[a.Artifact]),
    ("explain {boom}", "explain {boom}", a.JobExplanation),
    ("job retry {boom}", "job retry {again}", a.Retried),
    ("dlq list --failed", "dlq list --failed", list[dict[str, object]]),
    ("dlq retry --failed --limit 1 --all -y", "dlq retry --failed --limit 1 --all -y", a.Act),
    ("dlq move --limit 2 --all -y", "dlq move --limit 2 --all -y", a.Act),
    ("dlq discard --limit 1 --queue {failing} -y", "dlq discard --limit 1 --queue {failing} -y", a.Act),
    ("dlq list", "dlq list", list[dict[str, object]]),
    ("dlq show {letter}", "dlq show {letter}", dict[str, object]),
    ("dlq purge --limit 1 --kind frame -y", "dlq purge --limit 1 --kind frame -y", a.Act),
    ("outputs list", "outputs list", list[a.KeptOutput]),
    ("outputs show {kept}", "outputs show {kept} --reveal", a.KeptOutputShown),
    ("outputs redact {kept} --reason x", "outputs redact {kept} --reason x", a.KeptOutputChange),
    ("outputs release {kept} --reason x", "outputs release {kept} --reason x", a.KeptOutputChange),
    ("queue rebuild-counts", "queue rebuild-counts", a.Rebuilt),
    ("audit verify", "audit verify", a.AuditVerified),
]
PAST = "--from 2026-01-01T00:00Z --to 2026-01-01T05:00Z"
NO_RUN = sql("SELECT count(*) = 0 FROM rota.agent_running")
AGENTS = [
    ("agents list", "agents list", list[a.Agent]),
    ("agents show sync", "agents show sync", a.Agent),
    ("agents history sync", "agents history sync", list[a.AgentRun]),
    ("agents pause sync", "agents pause poll", a.AgentChange),
    (f"agents backfill sync {PAST}", f"agents backfill poll {PAST}", a.Backfill),
    ("agents backfill sync --stop", "agents backfill poll --stop", a.AgentChange),
    ("agents resume sync", "agents resume poll", a.AgentChange),
    ("agents trigger sync", "agents trigger poll", a.AgentTrigger),
    ("agents health", "agents health", a.AgentsHealth),
    ("agents remove sync", "agents remove poll", a.AgentGone),
]
POLICY = [
    ("policy check {policy}", "policy check {policy}", PolicyLintReport),
    ("policy test {policy}", "policy test {policy} --cases {cases}", policy_tests.PolicyTestReport),
    ("policy simulate {policy} --hours 1", "policy simulate {policy} --limit 3", PolicySimulation),
    ("policy explain {echo}", "policy explain {echo} --policy {policy}", JobPolicyExplanation),
    ("policy explain -s {submission}", "policy explain -s {submission}", JobPolicyExplanation),
    ("policy reload", "policy reload", a.PolicyReloaded),
]

RUN_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
WORKFLOWS = [
    ("workflow validate {flow}", "workflow validate {flow}", a.WorkflowPlan),
    ("workflow declare {flow}", "workflow declare {flow}", a.WorkflowDeclared),
    ("workflow definitions", "workflow definitions", list[a.WorkflowLine]),
    ("workflow run flow -i n=3 --wait", "workflow run {flow} -i n=4 --key k", a.RunStarted),
    ("workflow run flow --dry-run", "workflow run flow -i n=4 --dry-run", a.WorkflowDryRun),
    ("workflow list", "workflow list --workflow flow --state FAILED", list[a.RunLine]),
    ("workflow show {run}", "workflow show {run}", a.RunShown),
    ("workflow timeline {run}", "workflow timeline {run}", list[a.RunMoment]),
    ("workflow rerun {run} --from b", "workflow rerun {run} --from b", a.RunStarted),
    ("workflow rollback {run}", "workflow rollback {run}", a.RunRolledBack),
    ("workflow pause {slow}", "workflow pause {slow}", a.RunChanged),
    ("workflow resume {slow}", "workflow resume {slow}", a.RunChanged),
    ("workflow cancel {slow}", "workflow cancel {run}", a.RunChanged),
]
FLOW = """
name: flow
inputs: {n: 2}
steps:
  - {id: a, task: square, args: ["${input.n}"], compensate: {topic: undo, task: noop, context: {}}}
  - {id: b, task: noop, depends_on: [a]}
"""

APPROVALS = [
    ("approvals list", "approvals list", list[a.Approval]),
    ("approvals show {one}", "approvals show {two}", a.ApprovalShown),
    ("approvals approve {one}", "approvals approve {two}", a.ApprovalSaid),
    ("approvals reject {three}", "approvals reject {four}", a.ApprovalSaid),
    ("job remediate {denied}", "job remediate {refused}", a.Remediated),
]


@pytest.fixture
async def farm(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix, faces=services) as farm:
        await farm.show("default")
        await farm.worker(slots=60)
        yield farm


@pytest.fixture
def login(monkeypatch):
    """Gives the command line a key of the farm's API."""

    async def give_key(farm):
        async with Api(farm) as api:
            monkeypatch.setenv("ROTA_API_URL", farm.replica.listen_url)
            monkeypatch.setenv("ROTA_API_KEY", await api.key(Role.OPERATOR))

    return give_key


@pytest.fixture
def cli(monkeypatch, capsys, tmp_path, database_url, redis_url, nats_url, bus_prefix):
    monkeypatch.chdir(tmp_path)
    for name, value in (("POSTGRES_URL", database_url), ("REDIS_URL", redis_url), ("NATS_URL", nats_url)):
        monkeypatch.setenv(f"ROTA_{name}", value)
    monkeypatch.setenv("ROTA_NATS_PREFIX", bus_prefix)
    return Terminal(monkeypatch, capsys)


@pytest.mark.parametrize("lines", [QUOTA, OTHER], ids=["quota", "other"])
async def test_setup_commands_print_text_and_valid_json(farm, cli, lines):
    await run_all(cli, lines, {})


async def test_running_job_commands_print_text_and_valid_json(farm, cli):
    hanging("x")
    job = await farm.submit("hang", "x", show="default", frames=2)
    await farm.running("x", 2)
    layer = (await farm.jobs.get(job)).layers[0]
    await run_all(cli, RUNNING, {"hang": job, "layer": layer.id, "queue": layer.queue})


async def test_ended_job_commands_print_text_and_valid_json(farm, cli, login):
    await login(farm)
    made = {"echo": await farm.submit("echo", 1, show="default", frames=12)}
    made |= {name: await farm.submit("boom", show="default", frames=12) for name in ("boom", "again", "more")}
    for job in made.values():
        await farm.ended(job)
    made["failing"] = (await farm.jobs.get(made["more"])).layers[0].queue
    made["kept"] = await an_output(farm.database, made["more"], 10**12)
    await until(lambda: farm.database.value(FAILED))
    data = json.loads((await cli("submit --wait --json -- echo hello")).out)
    await until(lambda: farm.database.value(LOGGED), what="the output of the command, which may arrive after its end")
    await run_all(cli, ENDED, {**made, "command": data["id"]})


async def more_runs(database, name, runs):
    return len(await history(database, name)) > runs


async def test_agent_commands_print_text_and_valid_json(farm, cli, redis):
    seen = RunRecorder()
    async with Pod(farm.database, redis, sync=every(HOUR_MS, seen.quick), poll=every(HOUR_MS, seen.quick)):
        for name in ("sync", "poll"):
            await until(lambda name=name: history(farm.database, name))
        await run_all(cli, AGENTS[:-3], {})
        await until(lambda: farm.database.value(NO_RUN), what="the end of all runs so far")
        before = {name: len(await history(farm.database, name)) for name in ("sync", "poll")}
        await run_all(cli, AGENTS[-3:-1], {})
        for name, runs in before.items():  # a running agent cannot be removed
            await until(lambda name=name, runs=runs: more_runs(farm.database, name, runs), what="the triggered run")
        await until(lambda: farm.database.value(NO_RUN), what="the end of all runs")
        await run_all(cli, AGENTS[-1:], {})


async def test_policy_commands_print_text_and_valid_json(farm, cli, tmp_path, monkeypatch):
    made = {name: tmp_path / f"{name}.yaml" for name in ("policy", "submission")}
    made["policy"].write_text("rules: [{id: all, decision: allow}, {id: none, decision: deny, when: frames > 9}]\n")
    made["submission"].write_text("{show: default, layers: [{task: noop}]}\n")
    made["cases"] = tmp_path / "policy.cases.yaml"
    made["cases"].write_text("cases: [{job: {show: default, topic: t}, expect: permit}]\n")
    made["echo"] = await farm.submit("echo", 1, show="default", frames=12)
    await farm.ended(made["echo"])
    monkeypatch.setenv("ROTA_POLICY_FILE", str(made["policy"]))
    await run_all(cli, POLICY, made)
    result = await cli(f"policy explain {made['echo']}")
    assert "It is denied by rule none" in result.out
    made["cases"].write_text("cases: [{job: {show: default, topic: t}, expect: deny}]\n")
    failed = await cli(f"policy test {made['policy']}")
    assert (failed.status, "0 of 1 cases pass." in failed.out) == (1, True)


async def test_workflow_commands_print_text_and_valid_json(farm, cli, tmp_path, monkeypatch):
    flow, failing, slow = (tmp_path / f"{name}.yaml" for name in ("flow", "failing", "slow"))
    flow.write_text(FLOW)
    failing.write_text(
        FLOW.replace("task: noop, depends_on", "task: boom, depends_on").replace("name: flow", "name: failing")
    )
    slow.write_text("name: slow\nsteps: [{id: a, type: delay, delay_sec: 3600}]\n")
    made = {"flow": flow}
    for name, file in (("run", failing), ("slow", slow)):
        made[name] = json.loads(await cli.out(f"workflow run {file} --json"))["run"]
    waited = await cli(f"workflow run {failing} --wait")
    assert (waited.status, "no luck" in waited.out, waited.err) == (1, True, "")
    with monkeypatch.context() as patch:
        patch.setattr(sys.stderr, "isatty", lambda: True)
        followed = await cli(f"workflow run {failing} --wait")
    assert re.match(r"Run \S{36} has started\.\n", followed.err), (
        "the run id must be printed before the wait, for interrupted commands"
    )
    data = [line.split("  ")[1:3] for line in followed.err.splitlines()[1:]]
    assert (data[0], data[-1], data.count(["b", "failed"])) == (["(run)", "began"], ["(run)", "failed"], 1)
    await until(lambda: farm.database.value(RUN_ENDED, made["run"]))
    await run_all(cli, WORKFLOWS, made, farm.database)


async def test_approval_commands_print_text_and_valid_json(
    cli, login, monkeypatch, database_url, redis_url, nats_url, bus_prefix
):
    remediation = Remediation(id="safe", replacement_topic="safer")
    kernel = Table(default=TABLE["approval"], risky=decision(PolicyEffect.DENY, remediations=(remediation,)))
    monkeypatch.setattr(runtime, "build_policy_kernel", lambda *_: kernel)
    async with Farm(database_url, redis_url, nats_url, bus_prefix, faces=services) as farm:
        await farm.show("default")
        await login(farm)
        farm.submitter = farm.replica.engine.submitter
        made = {name: await farm.submit("noop", show="default") for name in ("one", "two", "three", "four")}
        made |= {name: await farm.submit("noop", show="default", topic="risky") for name in ("denied", "refused")}
        for name in ("denied", "refused"):
            await farm.ended(made[name])
        await until(lambda: farm.database.value(FOUR_APPROVALS), what="an approval request for each job")
        await run_all(cli, APPROVALS, made)


def test_every_command_is_covered():
    lines = [
        line for part in (QUOTA, OTHER, RUNNING, ENDED, AGENTS, POLICY, WORKFLOWS, APPROVALS) for line, _, _ in part
    ]
    missing = {
        path for path in PATHS - TESTED_ELSEWHERE if not any(f"{line} ".startswith(f"{path} ") for line in lines)
    }
    assert not missing


async def run_all(cli, lines, made, database=None):
    for text, data, type_ in lines:
        if "{letter}" in text:
            made["letter"] = str(json.loads(await cli.out("dlq list --json"))[0]["id"])
        result = await cli(text.format(**made))
        assert (text, result.status, result.err, bool(result.out.strip())) == (text, 0, "", True)
        if "rerun" in text:  # a second rerun is refused until the first has ended
            rerun = RUN_ID.findall(result.out)[-1]
            await until(lambda run=rerun: database.value(RUN_ENDED, run), what="the end of the rerun")
        result = await cli(f"{data.format(**made)} --json")
        assert (data, result.status, result.err) == (data, 0, "")
        try:
            msgspec.json.decode(result.out, type=type_, strict=True)
        except msgspec.ValidationError as error:
            pytest.fail(f"{data}: {error}\n{result.out}")


def _paths(command, path=""):
    found = getattr(command, "commands", None)
    if found is None:
        return {path}
    return {name for decision, below in found.items() for name in _paths(below, f"{path} {decision}".strip())}


PATHS = _paths(typer.main.get_command(app))
