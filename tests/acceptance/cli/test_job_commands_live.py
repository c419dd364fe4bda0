"""A job from before it is there until it is tried again: dry runs, jobs after jobs, watching, retrying."""

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
from tests.support.commands import Terminal, rows
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm, hanging
from tests.support.waiting import until

LEFT = sql("""
SELECT (SELECT count(*) FROM rota.job) + (SELECT count(*) FROM rota.job_done) + (SELECT count(*) FROM rota.queues)
     + (SELECT count(*) FROM rota.outbox) + (SELECT count(*) FROM rota.idempotency_key)
     + (SELECT count(*) FROM rota.audit) + (SELECT count(*) FROM rota.placement_class)""")


@pytest.fixture
async def farm(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as farm:
        await farm.show("default")
        yield farm


@pytest.fixture
def typed(monkeypatch, capsys, tmp_path, database_url, redis_url):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROTA_POSTGRES_URL", database_url)
    monkeypatch.setenv("ROTA_REDIS_URL", redis_url)
    return Terminal(monkeypatch, capsys)


async def submitted(typed, line):
    return json.loads(await typed.out(f"submit --json {line}"))["job"]


async def test_a_dry_run_tells_what_would_start_and_leaves_nothing(farm, typed):
    await farm.worker(slots=3)
    before = await farm.database.value(LEFT)
    text = await typed.out("submit noop --frames 1-9 --cores 0.5 --key once --dry-run")
    assert "noop would be submitted to the show default, topic noop: 9 frames." in text
    assert "policy: allowed" in text
    assert "3 frames of 9 would start now." in text
    assert text.endswith("Nothing was changed.\n")
    told = json.loads(await typed.out("submit nope --dry-run --json"))
    assert (told["starts"], told["explained"]["reasons"][0]["code"]) == (0, "unknown_task")
    refused = await typed("submit noop --show nosuch --dry-run")
    assert (refused.status, "There is no show 'nosuch'" in refused.err) == (ExitCode.BAD_INPUT, True)
    assert await farm.database.value(LEFT) == before
    job = await submitted(typed, "noop --key once")
    assert json.loads(await typed.out("submit noop --key once --dry-run --json"))["already"] == job


async def test_a_job_after_another_waits_for_it_and_explain_says_for_which(farm, typed):
    await farm.worker()
    gate = hanging("x")
    first = await submitted(typed, "hang x --name water")
    await farm.running("x", 1)
    then = await submitted(typed, "noop --after water --after-failed run")
    text = await typed.out(f"explain {then}")
    assert "waiting_on_job: It waits for another job to end: water (" in text
    assert f"`rota explain {first}` shows why that job has not ended." in text
    gate.set()
    assert (await typed(f"job wait {then}")).status == ExitCode.OK


async def test_watching_tells_how_far_a_job_is_and_ends_with_its_status(farm, typed):
    await farm.worker()
    gate = hanging("x")
    job = await submitted(typed, "hang x --frames 1-2")
    await farm.running("x", 2)
    said = await typed(f"job watch {job} --timeout 50ms")
    assert (said.status, said.out) == (ExitCode.NOT_ENDED, "")
    assert ": 0 of 2 frames ended, 2 on workers\nrota: Job " in said.err
    gate.set()
    assert (await typed(f"job watch {job}")).out.startswith("hang SUCCEEDED after ")
    failed = await submitted(typed, "boom")
    said = await typed(f"job watch {failed} -o yaml")
    assert (said.status, yaml.safe_load(said.out)["state"]) == (ExitCode.FAILED, "FAILED")


async def test_a_picture_of_a_job_fits_its_layers_and_says_how_long_it_takes(farm, typed):
    await farm.worker(slots=2)
    hanging("x")
    job = await submitted(typed, "hang x --frames 1-8")
    await farm.running("x", 2)
    found = await farm.jobs.get(UUID(job))
    watching = JobProgressDisplay()
    watching.show(found)
    assert str(layer_bar(found.layers[0], 8)) == "██░░░░░░"
    assert watching._pace_text(found) == ""


async def test_failed_frames_run_again_as_a_linked_job_and_all_of_them_when_asked(farm, typed):
    await farm.worker()
    job = await submitted(typed, "boom --frames 1-3")
    assert await farm.ended(job) == "FAILED"
    told = json.loads(await typed.out(f"job retry {job[:20]} --json"))
    assert (told["retry_of"], told["frames"]) == (job, 3)
    assert (await farm.jobs.get(UUID(told["job"]))).labels["retry_of"] == job
    assert await farm.ended(told["job"]) == "FAILED"
    again = await typed(f"job retry {job}")
    assert (again.status, "has no failed frame to retry" in again.err) == (ExitCode.BAD_INPUT, True)
    assert "runs 3 frames of job" in await typed.out(f"job retry {job} --all")


async def test_a_name_stops_a_job_only_where_it_is_the_only_live_one(farm, typed):
    for _ in range(2):
        await submitted(typed, "noop --name twin")
    said = await typed("job cancel twin")
    assert (said.status, "Several live jobs have the name 'twin'" in said.err) == (ExitCode.BAD_INPUT, True)
    alone = await submitted(typed, "noop --name alone --topic nowhere")
    assert f"Cancelled job {alone}" in await typed.out("job cancel alone")


async def test_wide_shows_more_columns_and_layers_can_be_named_by_what_it_shows(farm, typed):
    job = await submitted(typed, "noop --label shot=12")
    assert rows(await typed.out("jobs"))[0] == "job show name state frames age took reason"
    assert "shot=12" in await typed.out("jobs -o wide")
    assert [each["id"] for each in json.loads(await typed.out("jobs --label shot=12 --topic noop --json"))] == [job]
    assert "There is no matching job" in await typed.out("jobs --label shot=13")
    layer = (await farm.jobs.get(UUID(job))).layers[0].id
    assert str(layer) in await typed.out(f"job show {job} -o wide")
    assert "max cores 3" in await typed.out(f"layer set default {str(layer)[:30]} --max-cores 3")


def test_what_names_a_thing_is_whole_on_a_narrow_terminal():
    drawn = io.StringIO()
    console = Console(file=drawn, width=40)
    rows = [("default/default/render#1", "a long word that may be cut"), ("film/default/render#1", "another long word")]
    console.print(make_table(("queue", "what"), rows))
    assert "#1" in drawn.getvalue().replace("\n", "")
    assert "…" not in "".join(line[:18] for line in drawn.getvalue().splitlines())


def test_ids_are_shortened_as_far_as_they_can_be_told_apart():
    ids = ["01a1dfe3-7ca2-79ff-a3eb-61efd9180d8a", "01a1dfe3-7ca2-79fe-a3eb-61efd9180d8a"]
    assert shorten_ids(ids) == ["01a1dfe3-7ca2-79ff", "01a1dfe3-7ca2-79fe"]
    assert shorten_ids(ids[:1]) == ["01a1dfe3-7ca2"]


async def test_logs_are_followed_until_the_job_has_ended(farm, typed, tmp_path):
    """The command goes on when its first line was seen, so the line came before the end."""
    await farm.worker()
    flag = tmp_path / "seen"
    script = f"echo first; while ! test -e {flag}; do :; done; echo last"
    told = json.loads((await typed(["submit", "--json", "--", "sh", "-c", script])).out)
    logs, job = LogTail(farm.jobs, None, None, ("stdout",)), UUID(told["job"])
    assert [piece.data for piece in await until(lambda: logs.read_new(job))] == [b"first\n"]
    flag.touch()
    assert await typed.out(f"job logs {job} -f") == "first\nlast\n"
    pieces = [json.loads(line) for line in (await typed.out(f"job logs {job} -f --json")).splitlines()]
    assert "".join(piece["text"] for piece in pieces) == "first\nlast\n"
    refused = await typed(f"job logs {job} -f --attempt 1")
    assert (refused.status, "omit --attempt" in refused.err) == (ExitCode.BAD_INPUT, True)
