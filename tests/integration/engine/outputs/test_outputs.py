"""What frames return, looked at by a policy: what is kept back, held, redacted and let out, on real servers."""

import asyncio

import msgspec
import pytest

from rota.engine.outputs.async_scanner import CLAIM
from rota.engine.outputs.review import OutputReview as Desk
from rota.engine.outputs.review import OutputReviewer
from rota.model.errors import Forbidden, InvalidInput, NotFound, Unavailable
from rota.model.policy.outputs import OutputEffect, OutputScanMode
from rota.model.workflows.spec import StepSpec, WorkflowSpec
from rota.policy.output.evaluate import CompiledOutputPolicy
from rota.policy.output.rules import DEFAULT_RULES, OutputMatch, OutputRule
from rota.workflow.run_queries import RunQueries
from tests.support.outputs import SECRET, Watched
from tests.support.queue import sql
from tests.support.replica_and_worker import hanging
from tests.support.waiting import until

FRAMES = sql("SELECT state, output, value, code, checks, artifacts, error FROM rota.frame_end ORDER BY frame, attempt")
LETTERS = sql("SELECT kind, reason, cause, error FROM rota.dlq_entries ORDER BY dlq_id")
AUDITED = sql("SELECT actor, action, detail FROM rota.audit WHERE action LIKE 'output.%' ORDER BY seq")
SCANS = sql("SELECT token, mode, tries, unsettled, ts_due > now() AS waits FROM rota.scan ORDER BY token")
DUE = sql("UPDATE rota.scan SET ts_due = now()")
OLD = sql("UPDATE rota.scan SET ts_due = now(), ts_ended = ts_ended - interval '1 hour'")
BLOBS = sql("SELECT data FROM rota.blob")
ANN = OutputReviewer("key:ann", ("ann",))


def rule(says, name="r", **match):
    return OutputRule(id=name, decision=says, match=OutputMatch(**match), reason=f"{name} says so.", severity="high")


NO_SECRETS = rule(OutputEffect.QUARANTINE, "secrets", scanners=("secret",))
REDACTS = rule(OutputEffect.REDACT, "redacts", scanners=("secret", "pii"))


@pytest.fixture
async def farm(database_url, redis_url, nats_url, bus_prefix):
    async with Watched(database_url, redis_url, nats_url, bus_prefix) as farm:
        await farm.show()
        await farm.worker()
        yield farm
        await farm.quiet()


async def test_an_output_without_a_finding_is_let_out_with_its_records(farm):
    job = await farm.submit("echo", "hello")
    assert await farm.ended(job) == "SUCCEEDED"
    await farm.scanned()
    [row] = await farm.database.rows(FRAMES)
    assert (row["state"], row["output"], msgspec.msgpack.decode(row["value"])) == ("SUCCEEDED", None, "hello")
    assert [(each["phase"], each["says"]) for each in msgspec.json.decode(row["checks"])] == [
        ("sync", "ALLOW"),
        ("async", "ALLOW"),
    ]


async def test_a_secret_that_a_scan_finds_takes_the_success_back(farm):
    job = await farm.submit("echo", {"note": f"key {SECRET}"})
    await farm.state(job, "OUTPUT_QUARANTINED")
    [row] = await farm.database.rows(FRAMES)
    assert (row["state"], row["output"], row["code"]) == (
        "OUTPUT_QUARANTINED",
        "quarantined",
        "output_quarantined_async",
    )
    done = await farm.done(job)
    assert done["reason"] == "output_quarantined_async"
    assert [state for state, *_ in msgspec.json.decode(done["history"])][-2:] == ["SUCCEEDED", "OUTPUT_QUARANTINED"]
    assert (done["layers"][0]["succeeded"], done["layers"][0]["quarantined"]) == (0, 1)
    [letter] = await farm.database.rows(LETTERS)
    assert (letter["kind"], letter["reason"]) == ("output", "output_quarantined_async")
    [entry] = await farm.database.rows(AUDITED)
    assert entry["action"] == "output.quarantine"
    check = msgspec.json.decode(row["checks"])[-1]
    [finding] = check["findings"]
    assert (finding["name"], finding["where"], finding["offset"], finding["length"]) == (
        "aws_access_key",
        "value.note",
        4,
        20,
    )
    for told in (row["checks"], entry["detail"], letter["error"], row["error"]):
        assert SECRET not in told


async def values(farm, job):
    told = await farm.jobs.get(job)
    return [
        (end.value, end.value_at, end.artifacts, end.output) for end in await farm.jobs.frame_ends(told.layers[0].id)
    ]


def desk(farm):
    engine = farm.replica.engine
    return Desk(farm.database, engine.store, farm.replica.queue, engine.finisher)


async def kept(farm, **wanted):
    return await desk(farm).page(**wanted)


async def test_what_is_too_large_ends_as_quarantined_at_once(farm):
    farm.rules([rule(OutputEffect.QUARANTINE, "size", max_output_bytes=100)])
    job = await farm.submit("echo", "x" * 200)
    assert await farm.ended(job) == "OUTPUT_QUARANTINED"
    [row] = await farm.database.rows(FRAMES)
    assert (row["state"], row["output"], row["code"], row["error"]) == (
        "OUTPUT_QUARANTINED",
        "quarantined",
        "output_quarantined",
        "size says so.",
    )
    [letter] = await farm.database.rows(LETTERS)
    assert (letter["kind"], letter["reason"]) == ("output", "output_quarantined")
    assert [entry["action"] for entry in await farm.database.rows(AUDITED)] == ["output.quarantine"]
    assert await farm.database.rows(SCANS) == []
    assert await values(farm, job) == [(None, None, None, "quarantined")]


async def test_a_denied_output_is_kept_back_like_a_quarantined_one(farm):
    farm.rules([rule(OutputEffect.DENY, keywords=("classified",))])
    job = await farm.submit("echo", "This is ClassiFied.")
    await farm.state(job, "OUTPUT_QUARANTINED")


async def test_an_output_that_a_rule_allows_for_what_it_is_is_not_looked_into(farm):
    farm.rules([rule(OutputEffect.ALLOW, "trusted", topics=("default",)), NO_SECRETS])
    job = await farm.submit("echo", SECRET)
    assert await farm.ended(job) == "SUCCEEDED"
    [row] = await farm.database.rows(FRAMES)
    assert [each["phase"] for each in msgspec.json.decode(row["checks"])] == ["sync"]
    assert await farm.database.rows(SCANS) == []


async def test_frames_that_return_nothing_and_frames_that_fail_are_not_scanned(farm):
    farm.rules([rule(OutputEffect.QUARANTINE, "everything", has_error=False, output_size_gt=-1)])
    assert await farm.ended(await farm.submit("noop")) == "SUCCEEDED"
    assert await farm.ended(await farm.submit("boom")) == "FAILED"
    assert await farm.database.rows(SCANS) == []


async def test_a_scan_redacts_and_the_original_is_kept_for_its_release(farm):
    farm.rules([REDACTS])
    given = {"note": f"é {SECRET} ü", "mail": "ann@example.org", "n": 1}
    job = await farm.submit("echo", given)
    assert await farm.ended(job) == "SUCCEEDED"
    await farm.scanned()
    [(value, _, _, output)] = await values(farm, job)
    assert (msgspec.msgpack.decode(value), output) == (
        {"note": "é [REDACTED] ü", "mail": "[REDACTED]", "n": 1},
        "redacted",
    )
    [line] = await kept(farm)
    assert (line.state, line.rule) == ("redacted", "redacts")
    assert msgspec.msgpack.decode(await desk(farm).content(line.id, ANN)) == given
    assert (await desk(farm).release(line.id, ANN, "It is a test.")).changed
    outcome = (await farm.replica.engine.store.get((await values(farm, job))[0][1]), (await values(farm, job))[0][3])
    assert (msgspec.msgpack.decode(outcome[0]), outcome[1]) == (given, None)
    assert [entry["action"] for entry in await farm.database.rows(AUDITED)] == [
        "output.redact",
        "output.read",
        "output.release",
    ]


async def test_files_are_redacted_each_by_itself(farm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    farm.rules([rule(OutputEffect.REDACT, content_patterns=("b[.]txt of frame",))])
    job = await farm.submit("leave", "a.txt", "b.txt")
    assert await farm.ended(job) == "SUCCEEDED"
    await farm.scanned()
    told = await farm.jobs.get(job)
    files = {one.name: one.pointer for one in await farm.jobs.artifacts(told.layers[0].id)}
    found = {name: await farm.replica.engine.store.get(pointer) for name, pointer in files.items()}
    assert found == {"a.txt": b"a.txt of frame 0", "b.txt": b"[REDACTED] 0"}


async def test_a_rule_that_redacts_lets_nothing_pass_that_a_later_one_keeps_back(farm):
    farm.rules([rule(OutputEffect.REDACT, "mail", scanners=("pii",)), NO_SECRETS])
    job = await farm.submit("echo", f"ann@example.org {SECRET}")
    await farm.state(job, "OUTPUT_QUARANTINED")
    [line] = await kept(farm)
    assert line.rule == "secrets"


async def test_an_output_redacted_for_what_it_is_is_held_until_that_is_done(farm):
    farm.rules([rule(OutputEffect.REDACT, "by-topic", topics=("default",))])
    stop = stopped(farm)
    job = await farm.submit("echo", "whatever")
    assert await farm.ended(job) == "SUCCEEDED"
    assert await values(farm, job) == [(None, None, None, "held")]
    stop.set()
    await farm.scanned()
    assert msgspec.msgpack.decode((await values(farm, job))[0][0]) == "[REDACTED]"


def stopped(farm):
    """Whoever looks inside waits for the event."""
    going = asyncio.Event()
    for replica in farm.replicas:
        checker = replica.engine.scanner.checker
        check = checker.check

        async def late(meta, content, within_s, check=check):
            await going.wait()
            return await check(meta, content, within_s)

        checker.check = late
    return going


async def test_a_held_output_is_nobodys_until_it_was_scanned(farm):
    farm.rules(DEFAULT_RULES, topics={"def*": OutputScanMode.HOLD})
    going = stopped(farm)
    job = await farm.submit("echo", "hello")
    assert await farm.ended(job) == "SUCCEEDED"
    assert await values(farm, job) == [(None, None, None, "held")]
    assert [line.state for line in await kept(farm, state="held")] == ["held"]
    going.set()
    await farm.scanned()
    assert [msgspec.msgpack.decode(value) for value, *_ in await values(farm, job)] == ["hello"]
    assert await kept(farm) == []


async def test_what_comes_after_a_held_job_waits_for_its_scan(farm):
    farm.rules([NO_SECRETS], mode=OutputScanMode.HOLD)
    going = stopped(farm)
    first = await farm.submit("echo", "hello")
    second = await farm.submit("noop", after=(first,))
    assert await farm.ended(first) == "SUCCEEDED"
    assert (await farm.jobs.get(second)).reason == "waiting_on_job"
    going.set()
    assert await farm.ended(second) == "SUCCEEDED"


async def test_what_comes_after_a_quarantined_job_does_not_run(farm):
    farm.rules([NO_SECRETS], mode=OutputScanMode.HOLD)
    first = await farm.submit("echo", SECRET)
    second = await farm.submit("noop", after=(first,))
    assert await farm.ended(second) == "CANCELLED"
    assert (await farm.done(second))["reason"] == "job_before_failed"
    assert await farm.ended(first) == "OUTPUT_QUARANTINED"


async def of_workflow(farm, given):
    """A run of two steps, the second of which is given what the first returned."""
    steps = (
        StepSpec(id="a", task="echo", args=("${input.text}",)),
        StepSpec(id="b", task="echo", args=("got ${steps.a.output}",), depends_on=("a",)),
    )
    workflows = farm.replica.workflows
    await workflows.declare(WorkflowSpec(name="flow", show="film", steps=steps, inputs={"text": ""}), "ann")
    return (await workflows.start("film", "flow", {"text": given}, actor="ann")).run


async def run_ended(farm, run):
    found = await RunQueries(farm.database).get(run)
    return found if found.state.ended else None


@pytest.mark.parametrize(("given", "state"), [("hello", "SUCCEEDED"), (SECRET, "FAILED")])
async def test_a_workflow_hands_nothing_on_that_is_being_scanned(farm, given, state):
    farm.rules([NO_SECRETS])
    going = stopped(farm)
    run = await of_workflow(farm, given)
    await until(lambda: farm.database.rows(SCANS), what="the scan of the first step")
    farm.replica.workflows.advancer.wake()
    assert await farm.replica.workflows.advancer.advance_batch() == 0
    going.set()
    ended = await until(lambda: run_ended(farm, run), what="the end of the run")
    assert ended.state == state
    outputs = [step.output for step in ended.steps if step.output is not None]
    assert outputs == (["hello", "got hello"] if state == "SUCCEEDED" else [])


class Away:
    """A checker that cannot say."""

    def __init__(self, error):
        self.error = error
        self.asked = 0

    async def check(self, _meta, _content, _within_s):
        self.asked += 1
        raise self.error

    async def close(self):
        return None


@pytest.mark.parametrize(
    ("mode", "output", "state"),
    [(OutputScanMode.PASS, None, "SUCCEEDED"), (OutputScanMode.FAIL_CLOSED, "quarantined", "OUTPUT_QUARANTINED")],
)
async def test_silence_means_what_the_mode_of_the_topic_says(farm, mode, output, state):
    farm.rules([NO_SECRETS], mode=mode)
    farm.replica.engine.scanner.checker = Away(TimeoutError())
    job = await farm.submit("echo", "hello")
    await farm.ended(job)
    await farm.scanned()
    await farm.state(job, state)
    [row] = await farm.database.rows(FRAMES)
    assert row["output"] == output
    said = msgspec.json.decode(row["checks"])[-1]
    assert said["says"] == ("SKIPPED" if mode is OutputScanMode.PASS else "QUARANTINE")


async def test_scans_that_are_left_when_outputs_are_looked_at_no_more_stop_nobody(farm):
    scanner = farm.replica.engine.scanner
    step = scanner.scan_due

    async def nobody(_most=1):
        return 0

    scanner.scan_due = nobody
    run = await of_workflow(farm, "hello")
    await until(lambda: farm.database.rows(SCANS), what="a scan")
    farm.policy = None
    scanner.scan_due = step
    assert (await until(lambda: run_ended(farm, run), what="the run ended")).state == "SUCCEEDED"


async def test_a_held_output_stays_held_through_any_silence(farm):
    farm.rules([NO_SECRETS], mode=OutputScanMode.HOLD)
    away = farm.replica.engine.scanner.checker = Away(TimeoutError())
    job = await farm.submit("echo", "hello")
    await farm.ended(job)
    for asked in (1, 2):
        await until(lambda asked=asked: away.asked >= asked, what="another look")
        [scan] = await until(lambda: waiting(farm), what="the scan put off")
        assert scan["unsettled"] == 0
        assert await values(farm, job) == [(None, None, None, "held")]
        await farm.database.run(OLD)
    await farm.database.run(sql("DELETE FROM rota.scan"))


async def waiting(farm):
    return [row for row in await farm.database.rows(SCANS) if row["waits"] and not row["unsettled"]]


async def test_a_checker_that_is_away_is_asked_again_while_there_is_time(farm):
    farm.rules([NO_SECRETS])
    scanner = farm.replica.engine.scanner
    there, scanner.checker = scanner.checker, Away(Unavailable("The kernel is away."))
    job = await farm.submit("echo", SECRET)
    await until(lambda: waiting(farm), what="the scan put off")
    scanner.checker = there
    await farm.database.run(DUE)
    await farm.state(job, "OUTPUT_QUARANTINED")


async def test_what_kills_those_who_look_at_it_is_not_looked_at_for_ever(farm):
    farm.rules([NO_SECRETS], mode=OutputScanMode.FAIL_CLOSED)
    going = stopped(farm)
    job = await farm.submit("echo", "poison")
    await farm.ended(job)
    [scan] = await until(lambda: farm.database.rows(sql("SELECT token FROM rota.scan WHERE tries = 1")), what="a claim")
    died = sql("UPDATE rota.scan SET ts_due = now(), tries = 4, unsettled = 3 WHERE token = $1::bigint")
    await farm.database.run(died, scan["token"])
    going.set()
    await farm.scanned()
    await farm.state(job, "OUTPUT_QUARANTINED")


async def test_a_policy_that_breaks_passes_what_may_pass_and_keeps_the_rest(farm, monkeypatch):
    def broken(_self, _meta):
        raise RuntimeError("boom")

    monkeypatch.setattr(CompiledOutputPolicy, "check_metadata", broken)
    assert await farm.ended(await farm.submit("echo", "hello")) == "SUCCEEDED"
    farm.rules([NO_SECRETS], mode=OutputScanMode.FAIL_CLOSED)
    assert await farm.ended(await farm.submit("echo", "hello")) == "OUTPUT_QUARANTINED"
    farm.rules([NO_SECRETS], mode=OutputScanMode.HOLD)
    job = await farm.submit("echo", "hello")
    assert await farm.ended(job) == "SUCCEEDED"
    await farm.scanned()


async def test_a_secret_in_the_text_of_an_error_is_never_written_down(farm):
    job = await farm.submit("say", f"the key {SECRET} is wrong")
    assert await farm.ended(job) == "FAILED"
    [row] = await farm.database.rows(FRAMES)
    assert "[REDACTED]" in row["error"]
    assert SECRET not in row["error"]
    [failed] = await farm.database.rows(sql("SELECT error FROM rota.done_entries"))
    assert SECRET not in failed["error"]


async def test_an_error_that_there_was_no_time_to_look_at_is_not_written_down(farm, monkeypatch):
    monkeypatch.setattr("rota.engine.outputs.sync_check.ERROR_TEXT_BUDGET_S", -1.0)
    assert await farm.ended(await farm.submit("say", f"the key {SECRET} is wrong")) == "FAILED"
    [row] = await farm.database.rows(FRAMES)
    assert row["error"] == "[REDACTED]"


async def test_a_nul_within_a_secret_does_not_hide_it_in_an_error(farm):
    job = await farm.submit("say", f"the key {SECRET[:9]}\0{SECRET[9:]} is wrong")
    assert await farm.ended(job) == "FAILED"
    [row] = await farm.database.rows(FRAMES)
    assert SECRET not in row["error"]


async def test_a_release_lets_out_what_was_quarantined_without_running_it_again(farm):
    job = await farm.submit("echo", {"note": SECRET})
    await farm.state(job, "OUTPUT_QUARANTINED")
    [line] = await kept(farm, state="quarantined")
    with pytest.raises(InvalidInput, match="A reason is required"):
        await desk(farm).release(line.id, ANN, " ")
    assert (await desk(farm).release(line.id, ANN, "A test key.")).changed
    assert not (await desk(farm).release(line.id, ANN, "A test key.")).changed
    done = await farm.done(job)
    assert (done["state"], done["reason"]) == ("SUCCEEDED", None)
    assert (done["layers"][0]["succeeded"], done["layers"][0]["quarantined"]) == (1, 0)
    assert msgspec.msgpack.decode((await values(farm, job))[0][0]) == {"note": SECRET}
    assert await farm.database.rows(LETTERS) == []
    assert [(entry["actor"], entry["action"]) for entry in await farm.database.rows(AUDITED)] == [
        ("policy:output", "output.quarantine"),
        ("key:ann", "output.release"),
    ]
    assert [line.state for line in await kept(farm)] == ["released"]


async def test_a_person_redacts_what_was_quarantined(farm):
    job = await farm.submit("echo", {"note": f"see {SECRET}", "n": 1})
    await farm.state(job, "OUTPUT_QUARANTINED")
    [line] = await kept(farm)
    assert (await desk(farm).redact(line.id, ANN, "Only the key.")).changed
    assert (await farm.done(job))["state"] == "SUCCEEDED"
    assert msgspec.msgpack.decode((await values(farm, job))[0][0]) == {"note": "see [REDACTED]", "n": 1}
    assert msgspec.msgpack.decode(await desk(farm).content(line.id, ANN)) == {"note": f"see {SECRET}", "n": 1}


async def test_a_release_that_comes_right_after_a_redaction_lets_out_all_that_the_frame_left(farm):
    job = await farm.submit("echo", {"note": SECRET})
    await farm.state(job, "OUTPUT_QUARANTINED")
    [line] = await kept(farm)
    late = desk(farm)
    read = late._row

    async def read_before_the_redaction(output):
        row = await read(output)
        assert (await desk(farm).redact(output, ANN, "Only the key.")).changed
        return row

    late._row = read_before_the_redaction
    assert (await late.release(line.id, ANN, "A test key.")).changed
    [(_, at, _, output)] = await values(farm, job)
    assert (at is not None, output) == (True, None)
    assert msgspec.msgpack.decode(await farm.replica.engine.store.get(at)) == {"note": SECRET}
    [layer] = (await farm.done(job))["layers"]
    assert (layer["succeeded"], layer["quarantined"]) == (1, 0)


async def test_who_submitted_a_job_does_not_decide_about_its_output(farm):
    for who in ({"principal": "ann"}, {"actor_id": "ann"}):
        job = await farm.submit("echo", SECRET, **who)
        await farm.state(job, "OUTPUT_QUARANTINED")
        [line] = await kept(farm, job=job)
        for act in (desk(farm).release, desk(farm).redact):
            with pytest.raises(Forbidden, match="may not decide"):
                await act(line.id, ANN, "It is fine.")
        assert (await farm.done(job))["state"] == "OUTPUT_QUARANTINED"


async def test_an_output_nobody_keeps_back_is_unknown_to_those_who_decide(farm):
    with pytest.raises(NotFound):
        await desk(farm).get(12345)
    with pytest.raises(NotFound):
        await desk(farm).release(-1, ANN, "Why not.")


async def test_a_job_of_many_frames_is_quarantined_with_one_and_released_with_the_last(farm):
    job = await farm.submit("echo", SECRET, frames=3)
    await farm.state(job, "OUTPUT_QUARANTINED")
    await farm.scanned()
    assert (await farm.done(job))["layers"][0]["quarantined"] == 3
    lines = await kept(farm, job=job)
    for number, line in enumerate(lines, 1):
        await desk(farm).release(line.id, ANN, "fine")
        expected = "SUCCEEDED" if number == 3 else "OUTPUT_QUARANTINED"
        assert (await farm.done(job))["state"] == expected


async def test_a_frame_of_a_job_that_goes_on_is_counted_as_quarantined_and_the_job_ends_so(farm):
    gate = hanging("x")
    job = await farm.submit_layers(("echo", SECRET), ("hang", "x"))
    await farm.running("x")
    await until(lambda: farm.database.value(sql("SELECT sum(quarantined) = 1 FROM rota.layer")), what="the count moved")
    assert (await farm.database.value(sql("SELECT sum(succeeded) FROM rota.layer"))) == 0
    gate.set()
    assert await farm.ended(job) == "OUTPUT_QUARANTINED"


async def test_a_job_that_ended_worse_stays_so_when_a_scan_finds_something(farm):
    going = stopped(farm)
    job = await farm.submit_layers(("echo", SECRET), ("boom",))
    assert await farm.ended(job) == "FAILED"
    going.set()
    await farm.scanned()
    done = await farm.done(job)
    assert done["state"] == "FAILED"
    assert sum(layer["quarantined"] for layer in done["layers"]) == 1


async def test_a_verdict_that_comes_after_a_release_is_dropped(farm):
    farm.rules([NO_SECRETS], mode=OutputScanMode.HOLD)
    going = stopped(farm)
    job = await farm.submit("echo", SECRET)
    await farm.ended(job)
    [line] = await until(lambda: kept(farm, state="held"), what="a held output")
    await until(lambda: farm.database.rows(sql("SELECT FROM rota.scan WHERE tries = 1")), what="a claim")
    assert (await desk(farm).release(line.id, ANN, "It is known.")).changed
    going.set()
    marker = await farm.submit("echo", "another")
    await farm.ended(marker)
    await farm.scanned()
    assert (await farm.done(job))["state"] == "SUCCEEDED"
    assert [output for *_, output in await values(farm, job)] == [None]


async def test_a_job_cancelled_while_its_output_is_scanned_stays_cancelled(farm):
    gate = hanging("x")
    going = stopped(farm)
    job = await farm.submit_layers(("echo", SECRET), ("hang", "x"))
    await farm.running("x")
    await until(lambda: farm.database.rows(SCANS), what="a scan")
    await farm.replica.engine.canceller.cancel(job, "test")
    assert await farm.ended(job) == "CANCELLED"
    going.set()
    await farm.scanned()
    assert (await farm.done(job))["state"] == "CANCELLED"
    assert [output for *_, output in await values(farm, job)] == ["quarantined"]
    gate.set()


async def test_a_verdict_takes_effect_on_a_frame_that_succeeded_and_on_no_other(farm):
    farm.rules([NO_SECRETS], mode=OutputScanMode.HOLD)
    going = stopped(farm)
    job = await farm.submit("echo", SECRET)
    await farm.ended(job)
    await until(lambda: farm.database.rows(sql("SELECT FROM rota.scan WHERE tries = 1")), what="a claim")
    await farm.database.run(sql("UPDATE rota.frame_end SET state = 'FAILED'"))
    going.set()
    await farm.scanned()
    [row] = await farm.database.rows(FRAMES)
    assert (row["state"], row["output"]) == ("FAILED", "held")
    assert await farm.database.rows(LETTERS) == []
    assert (await farm.done(job))["state"] == "SUCCEEDED"


async def test_what_one_server_is_about_to_claim_another_passes_over(farm):
    scanner = farm.replica.engine.scanner
    step = scanner.scan_due

    async def nobody(_most=1):
        return 0

    scanner.scan_due = nobody
    await farm.ended(await farm.submit("echo", "hello", frames=2))
    async with farm.database.transaction() as first, farm.database.transaction() as second:
        assert len(await first.rows(CLAIM, 1, 60.0)) == 1
        async with asyncio.timeout(5):
            assert len(await second.rows(CLAIM, 5, 60.0)) == 1
    await farm.database.run(DUE)
    scanner.scan_due = step
    scanner.outputs.due.set()
    await farm.scanned()


async def test_two_servers_look_at_each_output_once(farm):
    await farm.server()
    seen = []
    for replica in farm.replicas:
        checker = replica.engine.scanner.checker
        check = checker.check

        async def counted(meta, content, within_s, check=check):
            seen.append(meta.number)
            return await check(meta, content, within_s)

        checker.check = counted
    job = await farm.submit("echo", SECRET, frames=200)
    await farm.state(job, "OUTPUT_QUARANTINED")
    await farm.scanned()
    assert sorted(seen) == list(range(200))
    assert (await farm.done(job))["layers"][0]["quarantined"] == 200


async def test_a_paused_servers_verdict_is_dropped_when_another_has_settled_the_scan(farm):
    scanner = farm.replica.engine.scanner
    going = stopped(farm)
    job = await farm.submit("echo", SECRET)
    await farm.ended(job)
    await until(lambda: farm.database.rows(sql("SELECT FROM rota.scan WHERE tries = 1")), what="a claim")
    await farm.database.run(sql("UPDATE rota.scan SET tries = 2, ts_due = now() + interval '1 hour'"))
    going.set()
    done = await farm.submit("echo", "another")
    await farm.ended(done)
    [left] = await until(lambda: one_scan(farm), what="the first verdict dropped")
    assert left["tries"] == 2
    assert (await farm.done(job))["state"] == "SUCCEEDED"
    await farm.database.run(DUE)
    scanner.outputs.due.set()
    await farm.state(job, "OUTPUT_QUARANTINED")


async def one_scan(farm):
    rows = await farm.database.rows(SCANS)
    return rows if len(rows) == 1 else None


async def test_without_an_output_policy_nothing_is_looked_at(database_url, redis_url, nats_url, bus_prefix):
    from tests.support.replica_and_worker import Farm

    async with Farm(database_url, redis_url, nats_url, bus_prefix) as farm:
        await farm.show()
        await farm.worker()
        assert farm.replica.engine.finisher.outputs is None
        assert await farm.ended(await farm.submit("echo", SECRET)) == "SUCCEEDED"
        [row] = await farm.database.rows(FRAMES)
        assert (row["output"], row["checks"]) == (None, None)
