"""Jobs, workers and pools as a person types them, on a farm that really runs them."""

import json
import os
import pwd
from datetime import UTC, datetime
from uuid import UUID

import msgspec
import pytest

from rota.cli.core.exit_codes import ExitCode
from rota.engine.recovery.retention import POINTERS
from rota.engine.submission.submitter import Submitter
from rota.infra.blob_store import BlobStore, BlobStoreTarget
from rota.model.jobs.submission import LayerSpec, RetrySpec, Submission
from tests.support.commands import Terminal, rows
from tests.support.jobs import a_show, left, task
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm, hanging, seen
from tests.support.waiting import until

ME = f"cli:{pwd.getpwuid(os.getuid()).pw_name}"
TRAIL = sql("SELECT actor, action, target FROM rota.audit ORDER BY seq DESC LIMIT 1")


@pytest.fixture
async def farm(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as farm:
        await farm.show("default")
        yield farm


@pytest.fixture
def typed(monkeypatch, capsys, tmp_path, database_url):
    """Neither Redis nor NATS are known: these commands need none."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROTA_POSTGRES_URL", database_url)
    return Terminal(monkeypatch, capsys)


async def submitted(typed, line):
    return json.loads(await typed.out(f"submit --json {line}"))["job"]


async def trail(farm):
    row = await farm.database.row(TRAIL)
    return row["actor"], row["action"], row["target"]


async def test_a_task_is_submitted_and_its_value_printed(farm, typed):
    await farm.worker()
    said = await typed("submit square 12 --wait")
    assert said.status == 0
    first, value = said.out.splitlines()
    assert first.startswith("square SUCCEEDED after ")
    assert value == "144"
    assert said.err.startswith("Submitted job ")


async def test_a_command_is_held_to_its_limits(farm, typed):
    await farm.worker()
    limits = "--limit cpu=1min --limit open-files=40 --limit file-size=1MiB"
    said = await typed(f"submit --wait {limits} -- dd if=/dev/zero of=f bs=2000000 count=1")
    assert said.status == 1
    assert "file_limit, The command wrote a file of more than 1MiB." in said.out
    for bad in ("cpu", "cpus=1", "open-files=x"):
        said = await typed(f"submit --limit {bad} -- true")
        assert (said.status, " is not a valid " in said.err) == (2, True)


async def test_files_that_frames_left_are_listed_and_fetched(farm, typed, tmp_path):
    await farm.worker()
    job = await submitted(typed, "leave a.txt b.txt --frames 4-5")
    assert await farm.ended(job) == "SUCCEEDED"
    listed = json.loads(await typed.out(f"job artifacts {job} --json"))
    assert [(each["frame"], each["name"], each["bytes"]) for each in listed] == [
        (frame, name, 16) for frame in (4, 5) for name in ("a.txt", "b.txt")
    ]
    assert rows(await typed.out(f"job artifacts {job} --frame 5"))[1].split()[:4] == ["leave", "5", "a.txt", "16"]
    assert "artifacts: 4 files, 64 bytes" in await typed.out(f"job show {job}")
    assert "Fetched 4 files to out, 64 bytes in all." in await typed.out(f"job artifacts {job} --to out")
    assert (tmp_path / "out/5/b.txt").read_text() == "b.txt of frame 5"
    assert "Fetched 4 files" in await typed.out(f"job artifacts {job} --to out"), "what is there stays"
    (tmp_path / "out/5/b.txt").write_text("mine")
    said = await typed(f"job artifacts {job} --to out")
    assert (said.status, "with different content" in said.err) == (2, True)
    assert (tmp_path / "out/5/b.txt").read_text() == "mine"


async def test_a_command_leaves_files_and_their_values_are_in_use(farm, typed, tmp_path):
    await farm.worker()
    said = await typed("submit --wait --artifact *.bin --name cmd -- dd if=/dev/zero of=x.bin bs=10 count=3")
    assert said.status == 0
    await typed.out("job artifacts cmd --to got")
    assert (tmp_path / "got/x.bin").read_bytes() == bytes(30)
    [listed] = json.loads(await typed.out("job artifacts cmd --json"))
    used = {row["pointer"] for row in await farm.database.rows(POINTERS, datetime.now(UTC)) if row["pointer"]}
    assert [pointer.split(":")[1] for pointer in used] == [listed["sha256"]]
    said = await typed("submit --wait --artifact *.exr -- true")
    assert said.status == 1
    assert "artifact_missing" in said.out
    assert "No frame of job" in await typed.out(f"job artifacts {await submitted(typed, 'noop')}")


async def test_words_are_json_names_or_text(farm, typed):
    await farm.worker()
    for words, value in (
        ("[1,{}]", [1, {}]),
        ("plain", "plain"),
        ("value=true", True),
        ('"a=b"', "a=b"),
        ("/a=b", "/a=b"),
    ):
        said = await typed(f"submit echo {words} --wait --json")
        assert said.status == 0, said.err
        assert json.loads(said.out)["results"] == [{"value": value}]


async def test_a_command_runs_as_it_stands(farm, typed):
    await farm.worker()
    said = await typed("submit --wait --json --frames 3-9x3 --name list -- test {frame} -ge 3")
    job = json.loads(said.out)
    assert (said.status, job["name"], job["state"]) == (0, "list", "SUCCEEDED")
    assert job["layers"][0]["argv"] == ["test", "{frame}", "-ge", "3"]
    assert (job["layers"][0]["frames"], job["layers"][0]["frame_spec"]) == (3, "3-9x3")


async def test_waiting_for_a_job_that_fails_says_why_and_exits_with_1(farm, typed):
    await farm.worker()
    said = await typed("submit boom -w --retries 1")
    assert said.status == 1
    assert "boom FAILED after" in said.out
    assert "It ended as FAILED at attempt 2: exception, ValueError: no luck" in said.out
    said = await typed("submit --frames 1-3 -w -- false")
    assert said.status == 1
    assert "0 of 3 frames succeeded." in said.out
    assert "Frame 1 ended as FAILED: exit_status" in said.out


async def test_everything_that_was_asked_for_is_submitted(typed, database):
    await a_show(database, "default")
    line = (
        "--folder default --dept default --topic render.fx --name comp --frames 1-10 --cores 2.5 --gpus 1 --memory 1GiB"
        " --max-cores 5 --priority batch --label a=b --label c=d=e --requires GPU --retries 3 --timeout 10min"
        " --deadline 2h --max-wait 90s --key once square 3"
    )
    job = await submitted(typed, line)
    told = json.loads(await typed.out(f"job show {job} --json"))
    assert (told["name"], told["topic"], told["priority"], told["labels"]) == (
        "comp",
        "render.fx",
        1,
        {"a": "b", "c": "d=e"},
    )
    assert told["details"]["requires"] == ["GPU"]
    assert (told["details"]["actor_id"], told["details"]["actor_type"]) == (ME, "human")
    [layer] = told["layers"]
    assert (layer["cores"], layer["gpus"], layer["memory_mb"], layer["frame_spec"]) == (2.5, 1, 1024, "1-10")
    assert told["deadline_at"] is not None
    assert told["wait_until"] is not None
    again = json.loads(await typed.out(f"submit --json {line}"))
    assert (again["job"], again["already"]) == (job, True)
    said = await typed(f"submit {line}4")
    assert (said.status, "[idempotency_conflict]" in said.err) == (1, True)


async def test_what_a_task_declares_is_taken_from_its_app(typed, database, tmp_path):
    await a_show(database, "default")
    (tmp_path / "needy.py").write_text(
        "from rota import Rota\napp = Rota()\n"
        "@app.task(cores=0.5, gpus=2, memory='1GiB', retries=4, timeout='1min', topic='t.x')\n"
        "def train(n): ...\n"
    )
    job = json.loads(await typed.out(f"job show {await submitted(typed, '--app needy.py train 1 --gpus 1')} --json"))
    [layer] = job["layers"]
    assert (job["topic"], layer["cores"], layer["gpus"], layer["memory_mb"]) == ("t.x", 0.5, 1, 1024)
    said = await typed("submit --app needy.py trian")
    assert (said.status, "did you mean train?" in said.err) == (2, True)


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


async def test_bad_input_is_refused_in_a_sentence_and_changes_nothing(typed, database):
    admin = await a_show(database, "default")
    await admin.create_pool("local", actor="ann")
    for line, sentence in BAD:
        said = await typed(line)
        assert (said.status, said.out) == (2, ""), line
        assert sentence in said.err, line
        assert said.err.count("\n") == 1, said.err
        assert said.err.endswith(("[invalid_input]\n", "[not_found]\n")), said.err
    assert await left(database) == {}


async def test_a_task_that_no_worker_knows_is_submitted_with_a_hint(farm, typed):
    await farm.worker()
    said = await typed("submit sqare 3 --name typo")
    assert said.status == 0
    assert "No running worker has the task sqare: did you mean square?" in said.err
    assert json.loads(await typed.out("job show typo --json"))["name"] == "typo"


async def test_jobs_are_listed_newest_first_and_filtered(farm, typed):
    assert "There is no matching job" in await typed.out("jobs")
    await farm.worker()
    hanging("x")
    running = await submitted(typed, "hang x --frames 1-4")
    await farm.running("x", 4)
    await until(lambda: farm.database.value(sql("SELECT state = 'RUNNING' FROM rota.job")))
    await typed("submit boom -w")
    listed = json.loads(await typed.out("jobs --json"))
    assert [(job["name"], job["frames"], job["ended"]) for job in listed] == [("boom", 1, 1), ("hang", 4, 0)]
    assert [job["name"] for job in json.loads(await typed.out("jobs --state failed --json"))] == ["boom"]
    assert [job["name"] for job in json.loads(await typed.out(f"jobs --after {listed[0]['id']} --json"))] == ["hang"]
    assert len(json.loads(await typed.out("jobs --limit 1 --show default --json"))) == 1
    table = await typed.out("jobs")
    assert table.splitlines()[0].split()[:4] == ["job", "show", "name", "state"]
    assert f"{running} default hang RUNNING 0 of 4" in "\n".join(rows(table))


async def test_a_job_is_shown_with_its_layers_and_its_way(farm, typed):
    await farm.worker()
    hanging("x")
    job = await submitted(typed, "hang x --frames 1-10")
    await farm.running("x", 8)
    await until(lambda: farm.database.value(sql("SELECT state = 'RUNNING' FROM rota.job")))
    text = await typed.out(f"job show {job[:20]}")
    assert f"hang {job}: RUNNING" in text
    assert "show default, folder default, department default, topic hang, priority 5 (INTERACTIVE)" in text
    assert "hang hang 10 (1-10) 1 core 2 8" in rows(text)
    assert "PENDING" in text.splitlines()[-1]
    told = json.loads(await typed.out(f"job show {job} --json"))
    assert told["layers"][0]["counts"] == {"WAITING": 2, "DISPATCHED": 8}
    assert [step["state"] for step in told["history"]] == ["PENDING", "SCHEDULED", "DISPATCHED", "RUNNING"]


async def test_cancelling_stops_what_runs_and_is_in_the_audit_trail(farm, typed):
    await farm.worker(slots=2)
    hanging("x")
    job = await submitted(typed, "hang x --frames 1-5")
    await farm.running("x", 2)
    assert await typed.out(f"job cancel {job}") == f"Cancelled job {job}: 5 frames of 5 were stopped or will not run.\n"
    assert await trail(farm) == (ME, "job.cancel", f"job:{job}")
    await until(lambda: seen.get("stopped") == ["x", "x"])
    assert await typed.out(f"job cancel {job}") == f"Nothing changed: job {job} has ended as CANCELLED.\n"
    assert json.loads(await typed.out(f"job cancel {job} --json")) == [
        {"job": job, "state": "CANCELLED", "changed": False}
    ]
    said = await typed(f"job wait {job}")
    assert (said.status, "hang CANCELLED after" in said.out) == (ExitCode.JOB_CANCELLED, True)
    await farm.quiet()


async def test_waiting_ends_when_the_time_is_over_and_the_job_goes_on(farm, typed):
    job = await submitted(typed, "noop")
    said = await typed(f"job wait {job} --timeout 50ms")
    assert (said.status, "has not ended within 0.05 s and is SCHEDULED" in said.err) == (ExitCode.NOT_ENDED, True)
    await farm.worker()
    assert (await typed(f"job wait {job[:18]}")).status == 0


async def test_results_of_frames_are_listed_by_their_numbers(farm, typed):
    await farm.worker()
    job = await submitted(typed, "echo [1,2] --frames 10-30x10")
    await typed(f"job wait {job}")
    listed = json.loads(await typed.out(f"job results {job} --json"))
    assert [(end["frame"], end["state"], end["value"]) for end in listed] == [
        (n, "SUCCEEDED", [1, 2]) for n in (10, 20, 30)
    ]
    assert [end["frame"] for end in json.loads(await typed.out(f"job results {job} --frame 20 --json"))] == [20]
    assert json.loads(await typed.out(f"job results {job} --frame 21 --json")) == []
    assert "The first 2 are shown" in await typed.out(f"job results {job} --limit 2")
    silent = await submitted(typed, "noop --frames 1-3")
    await typed(f"job wait {silent}")
    assert "has no results: 3 frames succeeded and returned nothing" in await typed.out(f"job results {silent}")


async def test_what_frames_write_is_printed(farm, typed):
    await farm.worker()
    said = await typed("submit --wait --name hello -- echo hi")
    assert (said.status, said.out.splitlines()[-1]) == (0, "hi")
    assert await typed.out("job logs hello") == "hi\n"
    [piece] = json.loads(await typed.out("job logs hello --stream stdout --json"))
    assert (piece["stream"], piece["text"], piece["attempt"]) == ("stdout", "hi\n", 1)
    said = await typed("job logs hello --stream stderr")
    assert (said.status, said.out, said.err) == (0, "", "No output is stored.\n")
    said = await typed("job logs hello --frame 7")
    assert (said.status, "has no frame 7" in said.err) == (2, True)


async def test_an_attempt_that_is_made_again_is_no_result(farm, typed):
    await farm.worker()
    job = await farm.submit("flaky", 1, show="default", layer={"retries": 1})
    assert (await typed(f"job wait {job}")).status == 0
    [end] = json.loads(await typed.out(f"job results {job} --json"))
    assert (end["attempt"], end["state"], end["value"]) == (2, "SUCCEEDED", 2)
    spec = LayerSpec(argv=("sh", "-c", "test $ROTA_ATTEMPT = 2"), retries=RetrySpec(most=1, first_s=0.01))
    [silent] = await farm.submitter.submit([Submission(show="default", layers=(spec,))])
    assert (await typed(f"job wait {silent.job}")).status == 0
    assert json.loads(await typed.out(f"job results {silent.job} --json")) == []


async def test_workers_are_shown_with_what_they_have_and_run(farm, typed):
    assert "No worker is up" in await typed.out("workers")
    stop = await farm.worker("render-1", slots=4, labels={"rack": "a"})
    hanging("x")
    job = await submitted(typed, "hang x --frames 1-3 --gpus 0")
    await farm.running("x", 3)
    [worker] = json.loads(await typed.out("workers --json"))
    assert (worker["name"], worker["pool"], worker["state"], worker["frames"]) == ("render-1", "local", "up", 3)
    assert (worker["cores"], worker["used_cores"], worker["gpus"], worker["used_gpus"]) == (4, 3, 0, 0)
    assert "render-1 local up for" in "\n".join(rows(await typed.out("workers")))
    await typed.out(f"job cancel {job}")
    await stop()
    await until(lambda: farm.database.value(sql("SELECT state <> 'up' FROM rota.worker")))
    assert json.loads(await typed.out("workers --json")) == []
    [worker] = json.loads(await typed.out("workers --all --json"))
    assert worker["state"] in ("gone", "lost")


async def test_pools_are_mapped_drained_and_activated(farm, typed):
    assert "* local" in rows(await typed.out("pool topics"))
    await farm.books.change(lambda admin: admin.create_pool("gpu", actor="test"))
    text = await typed.out("pool map train gpu local")
    assert "Topic train runs on gpu, then local now." in text
    assert "from now on jobs of unmapped topics fail, unless `rota pool map '*' local`" in text
    assert (
        await typed.out("pool map train gpu local") == "Nothing changed: topic train runs on gpu, then local already.\n"
    )
    assert await trail(farm) == (ME, "topic.map", "topic:train")
    assert "gets no new frames" in await typed.out("pool drain gpu --timeout 60s")
    assert "train gpu (draining), local" in rows(await typed.out("pool topics"))
    [topic] = json.loads(await typed.out("pool topics --json"))
    assert [(pool["name"], pool["status"]) for pool in topic["pools"]] == [("gpu", "draining"), ("local", "active")]
    await farm.database.run(sql("UPDATE rota.pool_spec SET ts_drain_started = now() - interval '61 seconds'"))
    assert "train gpu (inactive), local" in rows(await typed.out("pool topics"))
    assert json.loads(await typed.out("pool activate gpu --json"))["changed"] is True
    assert "is already active" in await typed.out("pool activate gpu")
    assert "its jobs go to local" in await typed.out("pool unmap train")


async def reasons(typed, job):
    told = json.loads(await typed.out(f"explain {job} --json"))
    return [reason["code"] for reason in told["reasons"]], told


async def test_explain_no_worker_then_an_unknown_task(farm, typed):
    job = await submitted(typed, "nobody-knows")
    assert (await reasons(typed, job))[0] == ["no_workers"]
    text = await typed.out(f"explain {job[:18]}")
    assert "1 frame waiting, 0 on workers (1 core per frame)" in text
    assert "No worker of local is connected: start one with `rota worker`." in text
    await farm.worker()
    assert (await reasons(typed, job))[0] == ["unknown_task"]
    assert "None of the 1 worker of its pools has the task nobody-knows." in await typed.out(f"explain {job}")


async def test_explain_names_the_limit_that_refuses_and_how_to_raise_it(farm, typed):
    await farm.worker(slots=50)
    await farm.books.change(lambda admin: admin.change_subscription("default", "local", burst=2, actor="test"))
    hanging("x")
    job = await submitted(typed, "hang x --frames 1-5")
    await farm.running("x", 2)
    codes, told = await reasons(typed, job)
    assert codes == ["quota_subscription"]
    assert (told["waiting"], told["on_workers"]) == (3, 2)
    reason = told["reasons"][0]
    assert reason["amounts"] == {"resource": "cores", "have": 2, "need": 1, "limit": 2}
    assert reason["refuser"] == {"kind": "subscription", "name": "default in local"}
    assert [(holder["id"], holder["frames"]) for holder in reason["holders"]] == [(job, 2)]
    text = await typed.out(f"explain {job}")
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
async def test_explain_names_each_level_that_refuses(farm, typed, monkeypatch, redis_url, cap, code):
    monkeypatch.setenv("ROTA_REDIS_URL", redis_url)
    await farm.worker(slots=2)
    await farm.books.change(lambda admin: admin.create_point("default", "default", actor="test"))
    hanging("x")
    job = await submitted(typed, "hang x --frames 1-3")
    await farm.running("x", 2)
    layer = json.loads(await typed.out(f"job show {job} --json"))["layers"][0]["id"]
    assert (await typed(cap.format(job=job, layer=layer))).status == 0
    assert (await reasons(typed, job))[0] == [code, "pool_overloaded"]


async def test_explain_a_job_that_waits_for_its_own_cap(farm, typed):
    await farm.worker(slots=50)
    hanging("x")
    job = await submitted(typed, "hang x --frames 1-5 --max-cores 2")
    await farm.running("x", 2)
    codes, told = await reasons(typed, job)
    assert codes == ["quota_job"]
    assert f"rota job set default {job} --max-cores 3" in told["reasons"][0]["remedy"]


async def test_explain_a_job_beyond_the_number_that_its_show_may_run(farm, typed, monkeypatch, redis_url):
    monkeypatch.setenv("ROTA_REDIS_URL", redis_url)
    await farm.worker(slots=50)
    await typed.out("show set default --max-jobs 1")
    await until(lambda: farm.replica.engine.dispatcher.concurrency_limiter.limited, what="the limit being known")
    hanging("x")
    running = await submitted(typed, "hang x")
    await farm.running("x")
    waiting = await submitted(typed, "noop")
    codes, told = await reasons(typed, waiting)
    assert codes == ["tenant_limit"]
    assert told["reasons"][0]["amounts"] == {"resource": "jobs", "have": 1, "need": 1, "limit": 1}
    assert [holder["id"] for holder in told["reasons"][0]["holders"]] == [running]
    text = await typed.out(f"explain {waiting}")
    assert "tenant_limit: The show default runs 1 of at most 1 concurrent job." in text
    assert "`rota show set default --max-jobs 2` raises the limit" in text
    assert (await reasons(typed, running))[0] == []
    await typed.out("show set default --max-jobs 2")
    assert await farm.ended(waiting) == "SUCCEEDED"


async def test_explain_full_workers_too_large_frames_and_paused_queues(farm, typed):
    await farm.worker("small", slots=2)
    hanging("x")
    job = await submitted(typed, "hang x --frames 1-3")
    await farm.running("x", 2)
    codes, told = await reasons(typed, job)
    assert codes == ["pool_overloaded"]
    assert told["reasons"][0]["passed"][0]["why"] == "its 2 slots are in use"
    large = await submitted(typed, "noop --cores 64")
    codes, told = await reasons(typed, large)
    assert codes == ["no_workers"]
    assert "a frame needs more than its total capacity" in told["reasons"][0]["sentence"]
    queue = json.loads(await typed.out(f"job show {large} --json"))["layers"][0]["queue"]
    await typed.out(f"queue pause {queue}")
    assert (await reasons(typed, large))[0] == ["paused", "no_workers"]


async def test_explain_a_retry_that_waits_for_its_time(farm, typed):
    await farm.worker()
    job = await farm.submit("boom", show="default", layer={"retries": {"most": 3, "first_s": 300.0}})
    await until(lambda: farm.database.value(sql("SELECT count(*) FROM rota.deferred_jobs")))
    codes, told = await reasons(typed, job)
    assert codes == ["deferred"]
    assert "1 frame is deferred" in told["reasons"][0]["sentence"]
    assert 140 < told["layers"][0]["start"]["in_s"] <= 300  # between half of it and all


async def test_explain_a_pool_without_a_share_and_a_job_that_has_ended(farm, typed):
    await farm.books.change(lambda admin: admin.create_pool("gpu", actor="test"))
    await farm.worker("g", pool="gpu")
    await typed.out("pool map noop gpu")
    job = await submitted(typed, "noop")
    codes, told = await reasons(typed, job)
    assert codes == ["quota_subscription"]
    assert "has no share of the pool gpu" in told["reasons"][0]["sentence"]
    await typed.out(f"job cancel {job}")
    assert "It has ended as CANCELLED: A user cancelled it." in await typed.out(f"explain {job}")


async def test_explain_tells_one_layer_and_what_ends_a_job_that_waits_too_long(farm, typed):
    job = await submitted(typed, "noop --max-wait 2h --deadline 5h")
    text = await typed.out(f"explain {job} --layer noop")
    assert "It fails unless one of its frames starts within 120 min." in text
    assert "Its deadline is in 5 h; it is then stopped." in text
    said = await typed(f"explain {job} --layer huge")
    assert (said.status, "has no layer 'huge'" in said.err) == (2, True)


async def test_explain_tells_which_frame_failed_first(farm, typed):
    await farm.worker()
    job = await a_failed_job(farm)
    assert "Frame 0 of boom failed first on w (" in await typed.out(f"explain {job}")
    assert json.loads(await typed.out(f"explain {job} --json"))["first_failure"]["worker"] == "w"


async def test_explain_says_when_no_server_is_up(typed, database):
    await a_show(database)
    [job] = await Submitter(database).submit([task()])
    codes, _ = await reasons(typed, job.job)
    assert codes[-1] == "no_server"


async def a_failed_job(farm):
    job = await farm.submit("boom", show="default")
    assert await farm.ended(job) == "FAILED"
    return str(job)


async def test_a_retry_says_which_jobs_it_made(farm, typed):
    await farm.worker()
    old = [await a_failed_job(farm) for _ in range(2)]
    told = json.loads(await typed.out("dlq retry --failed --all --yes --json"))
    assert (told["done"], sorted(each["retry_of"] for each in told["jobs"])) == (2, sorted(old))
    for each in told["jobs"]:
        assert await farm.ended(each["job"]) == "FAILED"
    said = rows(await typed.out("dlq retry --failed --all --yes"))
    assert said[:2] == ["Retried 2 failed frames: queued again with all attempts.", "new job frames retry of"]
    assert sorted(line.split()[2] for line in said[2:]) == sorted(each["job"] for each in told["jobs"])
    for line in said[2:]:
        assert await farm.ended(line.split()[0]) == "FAILED"


async def test_a_retry_and_a_submission_meet_the_policy_of_the_installation(farm, typed, monkeypatch):
    await farm.worker()
    await a_failed_job(farm)
    monkeypatch.setenv("ROTA_SAFETY_KERNEL_ADDR", "127.0.0.1:1")
    [retried] = json.loads(await typed.out("dlq retry --failed --all --yes --json"))["jobs"]
    for job in (retried["job"], await submitted(typed, "noop")):
        await farm.ended(job)
        first = (await farm.jobs.get(UUID(job))).history[0]
        assert (first.state, first.reason) == ("PENDING", "policy_pending")


@pytest.mark.parametrize("named", [True, False])
async def test_a_retry_takes_inputs_from_the_directory_of_the_store(farm, typed, monkeypatch, tmp_path, named):
    place = tmp_path / "elsewhere" if named else tmp_path / ".rota" / "store"
    store = BlobStore(farm.database, BlobStoreTarget(directory=place, small_bytes=0))
    [pointer] = await store.put([msgspec.msgpack.encode({"args": [], "kwargs": {}})])
    job = await farm.submit("boom", show="default")
    await farm.database.run(sql("UPDATE rota.layer SET input = NULL, input_at = $1"), pointer)
    await farm.worker()
    assert await farm.ended(job) == "FAILED"
    if named:
        monkeypatch.setenv("ROTA_STORE_DIRECTORY", str(place))
    [retried] = json.loads(await typed.out("dlq retry --failed --all --yes --json"))["jobs"]
    assert retried["retry_of"] == str(job)
