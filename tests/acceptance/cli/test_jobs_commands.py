"""Job, worker and pool commands on a running installation."""

import asyncio
import json
import os
import pwd
from datetime import UTC, datetime
from uuid import UUID

import msgspec
import pytest

from rota.cli.core.exit_codes import ExitCode
from rota.cli.jobs import logs
from rota.engine.recovery.retention import POINTERS
from rota.engine.submission.submitter import Submitter
from rota.infra.blob_store import BlobStore, BlobStoreTarget
from rota.model.jobs.submission import LayerSpec, RetrySpec, Submission
from tests.support.commands import Terminal, rows
from tests.support.jobs import NO_EVENTS, a_show, left, task
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm, hanging, seen
from tests.support.waiting import until

ME = f"cli:{pwd.getpwuid(os.getuid()).pw_name}"
LAST_AUDIT_ENTRY = sql("SELECT actor, action, target FROM rota.audit ORDER BY seq DESC LIMIT 1")


@pytest.fixture
async def farm(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as farm:
        await farm.show("default")
        yield farm


@pytest.fixture
def cli(monkeypatch, capsys, tmp_path, database_url):
    """Without Redis and NATS URLs: these commands need neither."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROTA_POSTGRES_URL", database_url)
    return Terminal(monkeypatch, capsys)


async def submitted(cli, line):
    return json.loads(await cli.out(f"submit --json {line}"))["job"]


async def last_audit_entry(farm):
    row = await farm.database.row(LAST_AUDIT_ENTRY)
    return row["actor"], row["action"], row["target"]


async def test_submit_wait_prints_the_task_result(farm, cli):
    await farm.worker()
    result = await cli("submit square 12 --wait")
    assert result.status == 0
    first, value = result.out.splitlines()
    assert first.startswith("square SUCCEEDED after ")
    assert value == "144"
    assert result.err.startswith("Submitted job ")


async def test_submit_limits_are_enforced_and_validated(farm, cli):
    await farm.worker()
    limits = "--limit cpu=1min --limit open-files=40 --limit file-size=1MiB"
    result = await cli(f"submit --wait {limits} -- dd if=/dev/zero of=f bs=2000000 count=1")
    assert result.status == 1
    assert "file_limit, The command wrote a file of more than 1MiB." in result.out
    for bad in ("cpu", "cpus=1", "open-files=x"):
        result = await cli(f"submit --limit {bad} -- true")
        assert (result.status, " is not a valid " in result.err) == (2, True)


async def test_job_artifacts_are_listed_and_fetched(farm, cli, tmp_path):
    await farm.worker()
    job = await submitted(cli, "leave a.txt b.txt --frames 4-5")
    assert await farm.ended(job) == "SUCCEEDED"
    listed = json.loads(await cli.out(f"job artifacts {job} --json"))
    assert [(each["frame"], each["name"], each["bytes"]) for each in listed] == [
        (frame, name, 16) for frame in (4, 5) for name in ("a.txt", "b.txt")
    ]
    assert rows(await cli.out(f"job artifacts {job} --frame 5"))[1].split()[:4] == ["leave", "5", "a.txt", "16"]
    assert "artifacts: 4 files, 64 bytes" in await cli.out(f"job show {job}")
    assert "Fetched 4 files to out, 64 bytes in all." in await cli.out(f"job artifacts {job} --to out")
    assert (tmp_path / "out/5/b.txt").read_text() == "b.txt of frame 5"
    assert "Fetched 4 files" in await cli.out(f"job artifacts {job} --to out"), (
        "existing files with the same content are kept"
    )
    (tmp_path / "out/5/b.txt").write_text("mine")
    result = await cli(f"job artifacts {job} --to out")
    assert (result.status, "with different content" in result.err) == (2, True)
    assert (tmp_path / "out/5/b.txt").read_text() == "mine"


async def test_command_artifacts_are_stored_and_referenced(farm, cli, tmp_path):
    await farm.worker()
    result = await cli("submit --wait --artifact *.bin --name cmd -- dd if=/dev/zero of=x.bin bs=10 count=3")
    assert result.status == 0
    await cli.out("job artifacts cmd --to got")
    assert (tmp_path / "got/x.bin").read_bytes() == bytes(30)
    [listed] = json.loads(await cli.out("job artifacts cmd --json"))
    used = {row["pointer"] for row in await farm.database.rows(POINTERS, datetime.now(UTC)) if row["pointer"]}
    assert [pointer.split(":")[1] for pointer in used] == [listed["sha256"]]
    result = await cli("submit --wait --artifact *.exr -- true")
    assert result.status == 1
    assert "artifact_missing" in result.out
    assert "No frame of job" in await cli.out(f"job artifacts {await submitted(cli, 'noop')}")


async def test_submit_arguments_are_json_keywords_or_text(farm, cli):
    await farm.worker()
    for words, value in (
        ("[1,{}]", [1, {}]),
        ("plain", "plain"),
        ("value=true", True),
        ('"a=b"', "a=b"),
        ("/a=b", "/a=b"),
    ):
        result = await cli(f"submit echo {words} --wait --json")
        assert result.status == 0, result.err
        assert json.loads(result.out)["results"] == [{"value": value}]


async def test_submitted_command_keeps_its_argv_and_frame_spec(farm, cli):
    await farm.worker()
    result = await cli("submit --wait --json --frames 3-9x3 --name list -- test {frame} -ge 3")
    job = json.loads(result.out)
    assert (result.status, job["name"], job["state"]) == (0, "list", "SUCCEEDED")
    assert job["layers"][0]["argv"] == ["test", "{frame}", "-ge", "3"]
    assert (job["layers"][0]["frames"], job["layers"][0]["frame_spec"]) == (3, "3-9x3")


async def test_submit_wait_on_failed_job_prints_the_error_and_exits_with_1(farm, cli):
    await farm.worker()
    result = await cli("submit boom -w --retries 1")
    assert result.status == 1
    assert "boom FAILED after" in result.out
    assert "It ended as FAILED at attempt 2: exception, ValueError: no luck" in result.out
    result = await cli("submit --frames 1-3 -w -- false")
    assert result.status == 1
    assert "0 of 3 frames succeeded." in result.out
    assert "Frame 1 ended as FAILED: exit_status" in result.out


async def test_submit_options_are_stored_in_the_job(cli, database):
    await a_show(database, "default")
    line = (
        "--folder default --dept default --topic render.fx --name comp --frames 1-10 --cores 2.5 --gpus 1 --memory 1GiB"
        " --max-cores 5 --priority batch --label a=b --label c=d=e --requires GPU --retries 3 --timeout 10min"
        " --deadline 2h --max-wait 90s --key once square 3"
    )
    job = await submitted(cli, line)
    data = json.loads(await cli.out(f"job show {job} --json"))
    assert (data["name"], data["topic"], data["priority"], data["labels"]) == (
        "comp",
        "render.fx",
        1,
        {"a": "b", "c": "d=e"},
    )
    assert data["details"]["requires"] == ["GPU"]
    assert (data["details"]["actor_id"], data["details"]["actor_type"]) == (ME, "human")
    [layer] = data["layers"]
    assert (layer["cores"], layer["gpus"], layer["memory_mb"], layer["frame_spec"]) == (2.5, 1, 1024, "1-10")
    assert data["deadline_at"] is not None
    assert data["wait_until"] is not None
    again = json.loads(await cli.out(f"submit --json {line}"))
    assert (again["job"], again["already"]) == (job, True)
    result = await cli(f"submit {line}4")
    assert (result.status, "[idempotency_conflict]" in result.err) == (1, True)


async def test_submit_uses_resources_declared_by_the_task(cli, database, tmp_path):
    await a_show(database, "default")
    (tmp_path / "needy.py").write_text(
        "from rota import Rota\napp = Rota()\n"
        "@app.task(cores=0.5, gpus=2, memory='1GiB', retries=4, timeout='1min', topic='t.x')\n"
        "def train(n): ...\n"
    )
    job = json.loads(await cli.out(f"job show {await submitted(cli, '--app needy.py train 1 --gpus 1')} --json"))
    [layer] = job["layers"]
    assert (job["topic"], layer["cores"], layer["gpus"], layer["memory_mb"]) == ("t.x", 0.5, 1, 1024)
    result = await cli("submit --app needy.py trian")
    assert (result.status, "did you mean train?" in result.err) == (2, True)


BAD = [
    ("submit", "There is no task or command, or both"),
    ("submit noop -- true", "There is no task or command, or both"),
    ("submit --", "There is no task or command, or both"),
    ("submit noop {x", "is not valid JSON"),
    ("submit noop a=1 a=2", "is repeated"),
    ("submit noop --frames 9-1", "runs backwards"),
    ("submit noop --frames x", "is not a valid frame spec"),
    ("submit noop --show defualt", "did you mean default?"),
    ("submit noop --folder nope", "no folder of show default 'nope'"),
    ("submit noop --dept nope", "no dept 'nope'"),
    ("submit noop --label x", "is not a valid label"),
    ("submit noop --timeout 5", "is not a valid duration"),
    ("submit noop --deadline x", "is not a valid duration"),
    ("submit noop --priority 10", "is not a valid priority"),
    ("submit noop --priority high", "is not a valid priority"),
    ("submit noop --cores x", "is not a valid amount of cores"),
    ("submit noop --gpus -1", "GPUs per frame"),
    ("submit noop --memory 5", "memory"),
    ("submit noop --cores 4 --max-cores 2", "cap"),
    ("submit noop --topic a/b", "is not a valid topic"),
    ("submit --app nothing.py noop", "There is no file"),
    ("submit --app nothing.py -- true", "omit it"),
    ("jobs --state runing", "did you mean RUNNING?"),
    ("jobs --show nope", "There is no show 'nope'"),
    ("jobs --limit 0", "is not a valid number of jobs"),
    ("job show nonsense", "There is no job with the id or name 'nonsense'"),
    ("job show 123", "There is no job with the id or name '123'"),
    ("job show 01234567-89ab", "There is no job"),
    ("job results 01234567-89ab", "There is no job"),
    ("job cancel 01234567-89ab", "There is no job"),
    ("job cancel noop", "There is no job with the id 'noop'"),
    ("job wait 01234567-89ab", "There is no job"),
    ("explain 01234567-89ab", "There is no job"),
    ("pool map render nope", "does not exist"),
    ("pool map a^b local", "is not a valid topic"),
    ("pool unmap render", "There is no topic 'render'"),
    ("pool drain nope", "does not exist"),
    ("pool drain local --timeout 3d", "1 to 3600 seconds"),
    ("pool activate nope", "does not exist"),
]


async def test_invalid_job_command_prints_one_error_and_changes_nothing(cli, database):
    admin = await a_show(database, "default")
    await admin.create_pool("local", actor="ann")
    for line, sentence in BAD:
        result = await cli(line)
        assert (result.status, result.out) == (2, ""), line
        assert sentence in result.err, line
        assert result.err.count("\n") == 1, result.err
        assert result.err.endswith(("[invalid_input]\n", "[not_found]\n")), result.err
    assert await left(database) == {}


async def test_submit_of_unknown_task_prints_a_suggestion(farm, cli):
    await farm.worker()
    result = await cli("submit sqare 3 --name typo")
    assert result.status == 0
    assert "No running worker has the task sqare: did you mean square?" in result.err
    assert json.loads(await cli.out("job show typo --json"))["name"] == "typo"


async def test_jobs_list_is_newest_first_and_filtered(farm, cli):
    assert "There is no matching job" in await cli.out("jobs")
    await farm.worker()
    hanging("x")
    running = await submitted(cli, "hang x --frames 1-4")
    await farm.running("x", 4)
    await until(lambda: farm.database.value(sql("SELECT state = 'RUNNING' FROM rota.job")))
    await cli("submit boom -w")
    listed = json.loads(await cli.out("jobs --json"))
    assert [(job["name"], job["frames"], job["ended"]) for job in listed] == [("boom", 1, 1), ("hang", 4, 0)]
    assert [job["name"] for job in json.loads(await cli.out("jobs --state failed --json"))] == ["boom"]
    assert [job["name"] for job in json.loads(await cli.out(f"jobs --after {listed[0]['id']} --json"))] == ["hang"]
    assert len(json.loads(await cli.out("jobs --limit 1 --show default --json"))) == 1
    table = await cli.out("jobs")
    assert table.splitlines()[0].split()[:4] == ["job", "show", "name", "state"]
    assert f"{running} default hang RUNNING 0 of 4" in "\n".join(rows(table))


async def test_job_show_prints_layers_and_state_history(farm, cli):
    await farm.worker()
    hanging("x")
    job = await submitted(cli, "hang x --frames 1-10")
    await farm.running("x", 8)
    await until(lambda: farm.database.value(sql("SELECT state = 'RUNNING' FROM rota.job")))
    text = await cli.out(f"job show {job[:20]}")
    assert f"hang {job}: RUNNING" in text
    assert "show default, folder default, department default, topic hang, priority 5 (INTERACTIVE)" in text
    assert "hang hang 10 (1-10) 1 core 2 8" in rows(text)
    assert "PENDING" in text.splitlines()[-1]
    data = json.loads(await cli.out(f"job show {job} --json"))
    assert data["layers"][0]["counts"] == {"WAITING": 2, "DISPATCHED": 8}
    assert [step["state"] for step in data["history"]] == ["PENDING", "SCHEDULED", "DISPATCHED", "RUNNING"]


async def test_job_cancel_stops_running_frames_and_is_audited(farm, cli):
    await farm.worker(slots=2)
    hanging("x")
    job = await submitted(cli, "hang x --frames 1-5")
    await farm.running("x", 2)
    assert await cli.out(f"job cancel {job}") == f"Cancelled job {job}: 5 frames of 5 were stopped or will not run.\n"
    assert await last_audit_entry(farm) == (ME, "job.cancel", f"job:{job}")
    await until(lambda: seen.get("stopped") == ["x", "x"])
    assert await cli.out(f"job cancel {job}") == f"Nothing changed: job {job} has ended as CANCELLED.\n"
    assert json.loads(await cli.out(f"job cancel {job} --json")) == [
        {"job": job, "state": "CANCELLED", "changed": False}
    ]
    result = await cli(f"job wait {job}")
    assert (result.status, "hang CANCELLED after" in result.out) == (ExitCode.JOB_CANCELLED, True)
    await farm.quiet()


async def test_job_wait_timeout_leaves_the_job_running(farm, cli):
    job = await submitted(cli, "noop")
    result = await cli(f"job wait {job} --timeout 50ms")
    assert (result.status, "has not ended within 0.05 s and is SCHEDULED" in result.err) == (ExitCode.NOT_ENDED, True)
    await farm.worker()
    assert (await cli(f"job wait {job[:18]}")).status == 0


async def test_job_results_are_listed_by_frame_number(farm, cli):
    await farm.worker()
    job = await submitted(cli, "echo [1,2] --frames 10-30x10")
    await cli(f"job wait {job}")
    listed = json.loads(await cli.out(f"job results {job} --json"))
    assert [(end["frame"], end["state"], end["value"]) for end in listed] == [
        (n, "SUCCEEDED", [1, 2]) for n in (10, 20, 30)
    ]
    assert [end["frame"] for end in json.loads(await cli.out(f"job results {job} --frame 20 --json"))] == [20]
    assert json.loads(await cli.out(f"job results {job} --frame 21 --json")) == []
    assert "The first 2 are shown" in await cli.out(f"job results {job} --limit 2")
    silent = await submitted(cli, "noop --frames 1-3")
    await cli(f"job wait {silent}")
    assert "has no results: 3 frames succeeded and returned nothing" in await cli.out(f"job results {silent}")


async def test_job_logs_print_frame_output(farm, cli):
    await farm.worker()
    result = await cli("submit --wait --name hello -- echo hi")
    assert (result.status, result.out.splitlines()[-1]) == (0, "hi")
    assert await cli.out("job logs hello") == "hi\n"
    [piece] = json.loads(await cli.out("job logs hello --stream stdout --json"))
    assert (piece["stream"], piece["text"], piece["attempt"]) == ("stdout", "hi\n", 1)
    result = await cli("job logs hello --stream stderr")
    assert (result.status, result.out, result.err) == (0, "", "No output is stored.\n")
    result = await cli("job logs hello --frame 7")
    assert (result.status, "has no frame 7" in result.err) == (2, True)


async def test_job_logs_waits_for_output_that_arrives_after_the_end(farm, cli, monkeypatch):
    monkeypatch.setattr(logs, "STORED_WITHIN_S", 60)
    asked = asyncio.Event()
    loop, read = asyncio.get_running_loop(), logs.LogReader.read

    async def read_and_tell(self, *args, **options):
        found = await read(self, *args, **options)
        loop.call_soon_threadsafe(asked.set)
        return found

    await farm.worker()
    async with farm.database.transaction() as locked:
        await locked.run(sql("LOCK TABLE rota.frame_log IN SHARE MODE"))
        job = await submitted(cli, "-- echo hi")
        await farm.ended(UUID(job))
        monkeypatch.setattr(logs.LogReader, "read", read_and_tell)
        printed = asyncio.create_task(cli.out(f"job logs {job}"))
        await asked.wait()
    assert await printed == "hi\n"


async def test_retried_attempt_is_not_listed_as_a_result(farm, cli):
    await farm.worker()
    job = await farm.submit("flaky", 1, show="default", layer={"retries": 1})
    assert (await cli(f"job wait {job}")).status == 0
    [end] = json.loads(await cli.out(f"job results {job} --json"))
    assert (end["attempt"], end["state"], end["value"]) == (2, "SUCCEEDED", 2)
    spec = LayerSpec(argv=("sh", "-c", "test $ROTA_ATTEMPT = 2"), retries=RetrySpec(most=1, first_s=0.01))
    [silent] = await farm.submitter.submit([Submission(show="default", layers=(spec,))])
    assert (await cli(f"job wait {silent.job}")).status == 0
    assert json.loads(await cli.out(f"job results {silent.job} --json")) == []


async def test_workers_list_shows_resources_and_running_frames(farm, cli):
    assert "No worker is up" in await cli.out("workers")
    stop = await farm.worker("render-1", slots=4, labels={"rack": "a"})
    hanging("x")
    job = await submitted(cli, "hang x --frames 1-3 --gpus 0")
    await farm.running("x", 3)
    [worker] = json.loads(await cli.out("workers --json"))
    assert (worker["name"], worker["pool"], worker["state"], worker["frames"]) == ("render-1", "local", "up", 3)
    assert (worker["cores"], worker["used_cores"], worker["gpus"], worker["used_gpus"]) == (4, 3, 0, 0)
    assert "render-1 local up for" in "\n".join(rows(await cli.out("workers")))
    await cli.out(f"job cancel {job}")
    await stop()
    await until(lambda: farm.database.value(sql("SELECT state <> 'up' FROM rota.worker")))
    assert json.loads(await cli.out("workers --json")) == []
    [worker] = json.loads(await cli.out("workers --all --json"))
    assert worker["state"] in ("gone", "lost")


async def test_pool_commands_map_drain_and_activate(farm, cli):
    assert "* local" in rows(await cli.out("pool topics"))
    await farm.accounting.change(lambda admin: admin.create_pool("gpu", actor="test"))
    text = await cli.out("pool map train gpu local")
    assert "Topic train runs on gpu, then local now." in text
    assert "from now on jobs of unmapped topics fail, unless `rota pool map '*' local`" in text
    assert (
        await cli.out("pool map train gpu local") == "Nothing changed: topic train runs on gpu, then local already.\n"
    )
    assert await last_audit_entry(farm) == (ME, "topic.map", "topic:train")
    assert "gets no new frames" in await cli.out("pool drain gpu --timeout 60s")
    assert "train gpu (draining), local" in rows(await cli.out("pool topics"))
    [topic] = json.loads(await cli.out("pool topics --json"))
    assert [(pool["name"], pool["status"]) for pool in topic["pools"]] == [("gpu", "draining"), ("local", "active")]
    await farm.database.run(sql("UPDATE rota.pool_spec SET ts_drain_started = now() - interval '61 seconds'"))
    assert "train gpu (inactive), local" in rows(await cli.out("pool topics"))
    assert json.loads(await cli.out("pool activate gpu --json"))["changed"] is True
    assert "is already active" in await cli.out("pool activate gpu")
    assert "its jobs go to local" in await cli.out("pool unmap train")


async def reasons(cli, job):
    data = json.loads(await cli.out(f"explain {job} --json"))
    return [reason["code"] for reason in data["reasons"]], data


async def test_explain_reports_no_workers_then_unknown_task(farm, cli):
    job = await submitted(cli, "nobody-knows")
    assert (await reasons(cli, job))[0] == ["no_workers"]
    text = await cli.out(f"explain {job[:18]}")
    assert "1 frame waiting, 0 on workers (1 core per frame)" in text
    assert "No worker of local is connected: start one with `rota worker`." in text
    await farm.worker()
    assert (await reasons(cli, job))[0] == ["unknown_task"]
    assert "None of the 1 worker of its pools has the task nobody-knows." in await cli.out(f"explain {job}")


async def test_explain_names_the_exceeded_limit_and_how_to_raise_it(farm, cli):
    await farm.worker(slots=50)
    await farm.accounting.change(lambda admin: admin.change_subscription("default", "local", burst=2, actor="test"))
    hanging("x")
    job = await submitted(cli, "hang x --frames 1-5")
    await farm.running("x", 2)
    codes, data = await reasons(cli, job)
    assert codes == ["quota_subscription"]
    assert (data["waiting"], data["on_workers"]) == (3, 2)
    reason = data["reasons"][0]
    assert reason["amounts"] == {"resource": "cores", "have": 2, "need": 1, "limit": 2}
    assert reason["refuser"] == {"kind": "subscription", "name": "default in local"}
    assert [(holder["id"], holder["frames"]) for holder in reason["holders"]] == [(job, 2)]
    text = await cli.out(f"explain {job}")
    assert "The show default in the pool local uses 2 of 2 cores, and a frame needs 1." in text
    assert "`rota sub set default local --burst 3` raises the limit" in text
    assert "in use by hang (2 frames, 2 cores)" in text
    assert "The start time is unknown: too little work of the show ended within the last hour." in text
    assert "2 frames of hang on w, the first for " in text
    assert "Unknown here" in text


@pytest.mark.parametrize(
    ("cap", "code"),
    [
        ("folder set default default --max-cores 2", "quota_folder"),
        ("dept set default default --max-cores 2", "quota_point"),
        ("job set default {job} --max-cores 2", "quota_job"),
        ("layer set default {layer} --max-cores 2", "quota_layer"),
    ],
)
async def test_explain_names_the_exceeded_quota_level(farm, cli, monkeypatch, redis_url, cap, code):
    monkeypatch.setenv("ROTA_REDIS_URL", redis_url)
    await farm.worker(slots=2)
    await farm.accounting.change(lambda admin: admin.create_point("default", "default", actor="test"))
    hanging("x")
    job = await submitted(cli, "hang x --frames 1-3")
    await farm.running("x", 2)
    layer = json.loads(await cli.out(f"job show {job} --json"))["layers"][0]["id"]
    assert (await cli(cap.format(job=job, layer=layer))).status == 0
    assert (await reasons(cli, job))[0] == [code, "pool_overloaded"]


async def test_explain_reports_a_job_waiting_for_its_own_cap(farm, cli):
    await farm.worker(slots=50)
    hanging("x")
    job = await submitted(cli, "hang x --frames 1-5 --max-cores 2")
    await farm.running("x", 2)
    codes, data = await reasons(cli, job)
    assert codes == ["quota_job"]
    assert f"rota job set default {job} --max-cores 3" in data["reasons"][0]["remedy"]


async def test_explain_reports_the_job_limit_of_the_show(farm, cli, monkeypatch, redis_url):
    monkeypatch.setenv("ROTA_REDIS_URL", redis_url)
    await farm.worker(slots=50)
    await cli.out("show set default --max-jobs 1")
    await until(
        lambda: farm.replica.engine.dispatcher.concurrency_limiter.limited, what="the dispatcher to load the limit"
    )
    hanging("x")
    running = await submitted(cli, "hang x")
    await farm.running("x")
    waiting = await submitted(cli, "noop")
    codes, data = await reasons(cli, waiting)
    assert codes == ["tenant_limit"]
    assert data["reasons"][0]["amounts"] == {"resource": "jobs", "have": 1, "need": 1, "limit": 1}
    assert [holder["id"] for holder in data["reasons"][0]["holders"]] == [running]
    text = await cli.out(f"explain {waiting}")
    assert "tenant_limit: The show default runs 1 of at most 1 concurrent job." in text
    assert "`rota show set default --max-jobs 2` raises the limit" in text
    assert (await reasons(cli, running))[0] == []
    await cli.out("show set default --max-jobs 2")
    assert await farm.ended(waiting) == "SUCCEEDED"


async def test_explain_reports_full_workers_oversized_frames_and_paused_queues(farm, cli):
    await farm.worker("small", slots=2)
    hanging("x")
    job = await submitted(cli, "hang x --frames 1-3")
    await farm.running("x", 2)
    codes, data = await reasons(cli, job)
    assert codes == ["pool_overloaded"]
    assert data["reasons"][0]["passed"][0]["why"] == "its 2 slots are in use"
    large = await submitted(cli, "noop --cores 64")
    codes, data = await reasons(cli, large)
    assert codes == ["no_workers"]
    assert "a frame needs more than its total capacity" in data["reasons"][0]["sentence"]
    queue = json.loads(await cli.out(f"job show {large} --json"))["layers"][0]["queue"]
    await cli.out(f"queue pause {queue}")
    assert (await reasons(cli, large))[0] == ["paused", "no_workers"]


async def test_explain_reports_a_deferred_retry(farm, cli):
    await farm.worker()
    job = await farm.submit("boom", show="default", layer={"retries": {"most": 3, "first_s": 300.0}})
    await until(lambda: farm.database.value(sql("SELECT count(*) FROM rota.deferred_jobs")))
    codes, data = await reasons(cli, job)
    assert codes == ["deferred"]
    assert "1 frame is deferred" in data["reasons"][0]["sentence"]
    assert 140 < data["layers"][0]["start"]["in_s"] <= 300  # jitter: between half of the delay and all of it


async def test_explain_reports_missing_subscription_and_ended_job(farm, cli):
    await farm.accounting.change(lambda admin: admin.create_pool("gpu", actor="test"))
    await farm.worker("g", pool="gpu")
    await cli.out("pool map noop gpu")
    job = await submitted(cli, "noop")
    codes, data = await reasons(cli, job)
    assert codes == ["quota_subscription"]
    assert "has no share of the pool gpu" in data["reasons"][0]["sentence"]
    await cli.out(f"job cancel {job}")
    assert "It has ended as CANCELLED: A user cancelled it." in await cli.out(f"explain {job}")


async def test_explain_layer_reports_max_wait_and_deadline(farm, cli):
    job = await submitted(cli, "noop --max-wait 2h --deadline 5h")
    text = await cli.out(f"explain {job} --layer noop")
    assert "It fails unless one of its frames starts within 120 min." in text
    assert "Its deadline is in 5 h; it is then stopped." in text
    result = await cli(f"explain {job} --layer huge")
    assert (result.status, "has no layer 'huge'" in result.err) == (2, True)


async def test_explain_reports_the_first_failed_frame(farm, cli):
    await farm.worker()
    job = await a_failed_job(farm)
    assert "Frame 0 of boom failed first on w (" in await cli.out(f"explain {job}")
    assert json.loads(await cli.out(f"explain {job} --json"))["first_failure"]["worker"] == "w"


async def test_explain_reports_that_no_server_is_up(cli, database):
    await a_show(database)
    [job] = await Submitter(database, NO_EVENTS).submit([task()])
    codes, _ = await reasons(cli, job.job)
    assert codes[-1] == "no_server"


async def a_failed_job(farm):
    job = await farm.submit("boom", show="default")
    assert await farm.ended(job) == "FAILED"
    return str(job)


async def test_dlq_retry_prints_the_jobs_it_created(farm, cli):
    await farm.worker()
    old = [await a_failed_job(farm) for _ in range(2)]
    data = json.loads(await cli.out("dlq retry --failed --all --yes --json"))
    assert (data["done"], sorted(each["retry_of"] for each in data["jobs"])) == (2, sorted(old))
    for each in data["jobs"]:
        assert await farm.ended(each["job"]) == "FAILED"
    result = rows(await cli.out("dlq retry --failed --all --yes"))
    assert result[:2] == ["Retried 2 failed frames: queued again with all attempts.", "new job frames retry of"]
    assert sorted(line.split()[2] for line in result[2:]) == sorted(each["job"] for each in data["jobs"])
    for line in result[2:]:
        assert await farm.ended(line.split()[0]) == "FAILED"


async def test_retry_and_submission_wait_for_the_policy_decision(farm, cli, monkeypatch):
    await farm.worker()
    await a_failed_job(farm)
    monkeypatch.setenv("ROTA_SAFETY_KERNEL_ADDR", "127.0.0.1:1")
    [retried] = json.loads(await cli.out("dlq retry --failed --all --yes --json"))["jobs"]
    for job in (retried["job"], await submitted(cli, "noop")):
        await farm.ended(job)
        first = (await farm.jobs.get(UUID(job))).history[0]
        assert (first.state, first.reason) == ("PENDING", "policy_pending")


@pytest.mark.parametrize("named", [True, False])
async def test_retry_reads_inputs_from_the_blob_store_directory(farm, cli, monkeypatch, tmp_path, named):
    directory = tmp_path / "elsewhere" if named else tmp_path / ".rota" / "store"
    store = BlobStore(farm.database, BlobStoreTarget(directory=directory, small_bytes=0))
    [pointer] = await store.put([msgspec.msgpack.encode({"args": [], "kwargs": {}})])
    job = await farm.submit("boom", show="default")
    await farm.database.run(sql("UPDATE rota.layer SET input = NULL, input_at = $1"), pointer)
    await farm.worker()
    assert await farm.ended(job) == "FAILED"
    if named:
        monkeypatch.setenv("ROTA_STORE_DIRECTORY", str(directory))
    [retried] = json.loads(await cli.out("dlq retry --failed --all --yes --json"))["jobs"]
    assert retried["retry_of"] == str(job)
