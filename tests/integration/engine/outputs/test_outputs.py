"""Output checks on real servers: allow, hold, redact, quarantine and release."""

import asyncio
from contextlib import asynccontextmanager

import msgspec
import pytest

from rota.engine.outputs import async_scanner
from rota.engine.outputs.async_scanner import CLAIM
from rota.engine.outputs.review import OutputReview, OutputReviewer
from rota.infra.blob_store import store as blob_store
from rota.model.errors import Forbidden, InvalidInput, NotFound, PostgresBusy, Unavailable
from rota.model.identity.principals import Principal
from rota.model.policy.outputs import OutputEffect, OutputScanMode
from rota.model.protocol import Artifact
from rota.model.workflows.spec import StepSpec, WorkflowSpec
from rota.policy.output.evaluate import CompiledOutputPolicy
from rota.policy.output.rules import DEFAULT_RULES, OutputMatch, OutputRule
from rota.worker import outcomes
from rota.workflow.run_queries import RunQueries
from tests.support.outputs import SECRET, OutputPolicyFarm
from tests.support.queue import sql
from tests.support.replica_and_worker import hanging
from tests.support.waiting import until

FRAMES = sql("SELECT state, output, value, code, checks, artifacts, error FROM rota.frame_end ORDER BY frame, attempt")
DEAD_LETTERS = sql("SELECT kind, reason, cause, error FROM rota.dlq_entries ORDER BY dlq_id")
AUDITED = sql("SELECT actor, action, detail FROM rota.audit WHERE action LIKE 'output.%' ORDER BY seq")
SCANS = sql("SELECT token, mode, tries, unsettled, ts_due > now() AS waits FROM rota.scan ORDER BY token")
DUE = sql("UPDATE rota.scan SET ts_due = now()")
OLD = sql("UPDATE rota.scan SET ts_due = now(), ts_ended = ts_ended - interval '1 hour'")
CARRY = sql("SELECT rota.frame_ends_carry((now() AT TIME ZONE 'UTC')::date, 100)")
BLOCKED = sql("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")
BLOBS = sql("SELECT data FROM rota.blob")
ANN = OutputReviewer("key:ann", Principal("ann"))


def rule(effect, name="r", **match):
    return OutputRule(id=name, decision=effect, match=OutputMatch(**match), reason=f"{name} says so.", severity="high")


NO_SECRETS = rule(OutputEffect.QUARANTINE, "secrets", scanners=("secret",))
REDACTS = rule(OutputEffect.REDACT, "redacts", scanners=("secret", "pii"))


@pytest.fixture
async def cluster(database_url, redis_url, nats_url, bus_prefix):
    async with OutputPolicyFarm(database_url, redis_url, nats_url, bus_prefix) as cluster:
        await cluster.show()
        await cluster.worker()
        yield cluster
        await cluster.quiet()


async def test_clean_output_is_released_with_its_check_records(cluster):
    job = await cluster.submit("echo", "hello")
    assert await cluster.ended(job) == "SUCCEEDED"
    await cluster.scanned()
    [row] = await cluster.database.rows(FRAMES)
    assert (row["state"], row["output"], msgspec.msgpack.decode(row["value"])) == ("SUCCEEDED", None, "hello")
    assert [(each["phase"], each["says"]) for each in msgspec.json.decode(row["checks"])] == [
        ("sync", "ALLOW"),
        ("async", "ALLOW"),
    ]


async def test_scan_that_finds_a_secret_quarantines_a_succeeded_job(cluster):
    job = await cluster.submit("echo", {"note": f"key {SECRET}"})
    await cluster.state(job, "OUTPUT_QUARANTINED")
    [row] = await cluster.database.rows(FRAMES)
    assert (row["state"], row["output"], row["code"]) == (
        "OUTPUT_QUARANTINED",
        "quarantined",
        "output_quarantined_async",
    )
    done = await cluster.done(job)
    assert done["reason"] == "output_quarantined_async"
    assert [state for state, *_ in msgspec.json.decode(done["history"])][-2:] == ["SUCCEEDED", "OUTPUT_QUARANTINED"]
    assert (done["layers"][0]["succeeded"], done["layers"][0]["quarantined"]) == (0, 1)
    [dead_letter] = await cluster.database.rows(DEAD_LETTERS)
    assert (dead_letter["kind"], dead_letter["reason"]) == ("output", "output_quarantined_async")
    [entry] = await cluster.database.rows(AUDITED)
    assert entry["action"] == "output.quarantine"
    check = msgspec.json.decode(row["checks"])[-1]
    [finding] = check["findings"]
    assert (finding["name"], finding["where"], finding["offset"], finding["length"]) == (
        "aws_access_key",
        "value.note",
        4,
        20,
    )
    for stored in (row["checks"], entry["detail"], dead_letter["error"], row["error"]):
        assert SECRET not in stored


async def values(cluster, job):
    found_job = await cluster.jobs.get(job)
    return [
        (end.value, end.value_at, end.artifacts, end.output)
        for end in await cluster.jobs.frame_ends(found_job.layers[0].id)
    ]


def review(cluster):
    engine = cluster.replica.engine
    return OutputReview(cluster.database, engine.store, cluster.replica.queue, engine.completions)


async def review_page(cluster, **filters):
    return await review(cluster).page(**filters)


async def test_oversized_output_is_quarantined_at_once(cluster):
    cluster.rules([rule(OutputEffect.QUARANTINE, "size", max_output_bytes=100)])
    job = await cluster.submit("echo", "x" * 200)
    assert await cluster.ended(job) == "OUTPUT_QUARANTINED"
    [row] = await cluster.database.rows(FRAMES)
    assert (row["state"], row["output"], row["code"], row["error"]) == (
        "OUTPUT_QUARANTINED",
        "quarantined",
        "output_quarantined",
        "size says so.",
    )
    [dead_letter] = await cluster.database.rows(DEAD_LETTERS)
    assert (dead_letter["kind"], dead_letter["reason"]) == ("output", "output_quarantined")
    assert [entry["action"] for entry in await cluster.database.rows(AUDITED)] == ["output.quarantine"]
    assert await cluster.database.rows(SCANS) == []
    assert await values(cluster, job) == [(None, None, None, "quarantined")]


async def test_denied_output_is_quarantined(cluster):
    cluster.rules([rule(OutputEffect.DENY, keywords=("classified",))])
    job = await cluster.submit("echo", "This is ClassiFied.")
    await cluster.state(job, "OUTPUT_QUARANTINED")


async def test_output_allowed_by_its_metadata_is_not_scanned(cluster):
    cluster.rules([rule(OutputEffect.ALLOW, "trusted", topics=("default",)), NO_SECRETS])
    job = await cluster.submit("echo", SECRET)
    assert await cluster.ended(job) == "SUCCEEDED"
    [row] = await cluster.database.rows(FRAMES)
    assert [each["phase"] for each in msgspec.json.decode(row["checks"])] == ["sync"]
    assert await cluster.database.rows(SCANS) == []


async def test_frames_without_output_and_failed_frames_are_not_scanned(cluster):
    cluster.rules([rule(OutputEffect.QUARANTINE, "everything", has_error=False, output_size_gt=-1)])
    assert await cluster.ended(await cluster.submit("noop")) == "SUCCEEDED"
    assert await cluster.ended(await cluster.submit("boom")) == "FAILED"
    assert await cluster.database.rows(SCANS) == []


async def test_scan_redacts_and_keeps_the_original_for_release(cluster):
    cluster.rules([REDACTS])
    given = {"note": f"é {SECRET} ü", "mail": "ann@example.org", "n": 1}
    job = await cluster.submit("echo", given)
    assert await cluster.ended(job) == "SUCCEEDED"
    await cluster.scanned()
    [(value, _, _, output)] = await values(cluster, job)
    assert (msgspec.msgpack.decode(value), output) == (
        {"note": "é [REDACTED] ü", "mail": "[REDACTED]", "n": 1},
        "redacted",
    )
    [line] = await review_page(cluster)
    assert (line.state, line.rule) == ("redacted", "redacts")
    assert msgspec.msgpack.decode(await review(cluster).content(line.id, ANN.audited)) == given
    assert (await review(cluster).release(line.id, ANN, "It is a test.")).changed
    outcome = (
        await cluster.replica.engine.store.get((await values(cluster, job))[0][1]),
        (await values(cluster, job))[0][3],
    )
    assert (msgspec.msgpack.decode(outcome[0]), outcome[1]) == (given, None)
    assert [entry["action"] for entry in await cluster.database.rows(AUDITED)] == [
        "output.redact",
        "output.read",
        "output.release",
    ]


async def test_artifacts_are_redacted_individually(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cluster.rules([rule(OutputEffect.REDACT, content_patterns=("b[.]txt of frame",))])
    job = await cluster.submit("leave", "a.txt", "b.txt")
    assert await cluster.ended(job) == "SUCCEEDED"
    await cluster.scanned()
    found_job = await cluster.jobs.get(job)
    files = {one.name: one.pointer for one in await cluster.jobs.artifacts(found_job.layers[0].id)}
    found = {name: await cluster.replica.engine.store.get(pointer) for name, pointer in files.items()}
    assert found == {"a.txt": b"a.txt of frame 0", "b.txt": b"[REDACTED] 0"}


async def test_files_are_scanned_and_redacted_in_chunks_and_never_read_whole(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cluster.rules([rule(OutputEffect.REDACT, content_patterns=("b[.]txt of frame",))])
    store = cluster.replica.engine.store

    async def read_whole(*_args):
        raise AssertionError("a file was read whole")

    monkeypatch.setattr(store, "get", read_whole)
    monkeypatch.setattr(blob_store, "PART_BYTES", 4)
    job = await cluster.submit("leave", "a.txt", "b.txt")
    assert await cluster.ended(job) == "SUCCEEDED"
    await cluster.scanned()
    found_job = await cluster.jobs.get(job)
    found = {
        one.name: b"".join([part async for part in store.read(one.pointer)])
        for one in await cluster.jobs.artifacts(found_job.layers[0].id)
    }
    assert found == {"a.txt": b"a.txt of frame 0", "b.txt": b"[REDACTED] 0"}


async def test_failed_attempt_stores_no_output_that_nobody_would_scan(cluster, monkeypatch):
    end = outcomes.failure_end

    def failure_with_output(*args):
        artifacts = (Artifact("a.txt", data=SECRET.encode()),)
        return msgspec.structs.replace(end(*args), value=msgspec.msgpack.encode(SECRET), artifacts=artifacts)

    monkeypatch.setattr(outcomes, "failure_end", failure_with_output)
    assert await cluster.ended(await cluster.submit("boom")) == "FAILED"
    [row] = await cluster.database.rows(FRAMES)
    assert (row["state"], row["value"], row["artifacts"]) == ("FAILED", None, None)
    assert await cluster.database.rows(BLOBS) == []


async def test_redact_rule_does_not_override_a_later_quarantine_rule(cluster):
    cluster.rules([rule(OutputEffect.REDACT, "mail", scanners=("pii",)), NO_SECRETS])
    job = await cluster.submit("echo", f"ann@example.org {SECRET}")
    await cluster.state(job, "OUTPUT_QUARANTINED")
    [line] = await review_page(cluster)
    assert line.rule == "secrets"


async def test_output_redacted_by_its_metadata_is_held_until_redacted(cluster):
    cluster.rules([rule(OutputEffect.REDACT, "by-topic", topics=("default",))])
    stop = pause_checkers(cluster)
    job = await cluster.submit("echo", "whatever")
    assert await cluster.ended(job) == "SUCCEEDED"
    assert await values(cluster, job) == [(None, None, None, "held")]
    stop.set()
    await cluster.scanned()
    assert msgspec.msgpack.decode((await values(cluster, job))[0][0]) == "[REDACTED]"


def pause_checkers(cluster):
    """Make every content checker wait for the returned event."""
    resume = asyncio.Event()
    for replica in cluster.replicas:
        checker = replica.engine.scanner.checker
        check = checker.check

        async def late(meta, content, within_s, check=check):
            await resume.wait()
            return await check(meta, content, within_s)

        checker.check = late
    return resume


async def test_held_output_is_unreadable_until_scanned(cluster):
    cluster.rules(DEFAULT_RULES, topics={"def*": OutputScanMode.HOLD})
    resume = pause_checkers(cluster)
    job = await cluster.submit("echo", "hello")
    assert await cluster.ended(job) == "SUCCEEDED"
    assert await values(cluster, job) == [(None, None, None, "held")]
    assert [line.state for line in await review_page(cluster, state="held")] == ["held"]
    resume.set()
    await cluster.scanned()
    assert [msgspec.msgpack.decode(value) for value, *_ in await values(cluster, job)] == ["hello"]
    assert await review_page(cluster) == []


async def test_dependent_of_a_held_job_waits_for_its_scan(cluster):
    cluster.rules([NO_SECRETS], mode=OutputScanMode.HOLD)
    resume = pause_checkers(cluster)
    first = await cluster.submit("echo", "hello")
    second = await cluster.submit("noop", after=(first,))
    assert await cluster.ended(first) == "SUCCEEDED"
    assert (await cluster.jobs.get(second)).reason == "waiting_on_job"
    resume.set()
    assert await cluster.ended(second) == "SUCCEEDED"


async def test_dependent_of_a_quarantined_job_is_cancelled(cluster):
    cluster.rules([NO_SECRETS], mode=OutputScanMode.HOLD)
    first = await cluster.submit("echo", SECRET)
    second = await cluster.submit("noop", after=(first,))
    assert await cluster.ended(second) == "CANCELLED"
    assert (await cluster.done(second))["reason"] == "job_before_failed"
    assert await cluster.ended(first) == "OUTPUT_QUARANTINED"


async def start_workflow(cluster, given):
    """Start a run of two steps; the second gets the output of the first."""
    steps = (
        StepSpec(id="a", task="echo", args=("${input.text}",)),
        StepSpec(id="b", task="echo", args=("got ${steps.a.output}",), depends_on=("a",)),
    )
    workflows = cluster.replica.workflows
    await workflows.declare(WorkflowSpec(name="flow", show="film", steps=steps, inputs={"text": ""}), "ann")
    return (await workflows.start("film", "flow", {"text": given}, actor="ann")).run


async def run_ended(cluster, run):
    found = await RunQueries(cluster.database).get(run)
    return found if found.state.ended else None


@pytest.mark.parametrize(("given", "state"), [("hello", "SUCCEEDED"), (SECRET, "FAILED")])
async def test_workflow_step_output_is_not_passed_on_before_its_scan(cluster, given, state):
    cluster.rules([NO_SECRETS])
    resume = pause_checkers(cluster)
    run = await start_workflow(cluster, given)
    await until(lambda: cluster.database.rows(SCANS), what="the scan of the first step")
    cluster.replica.workflows.advancer.wake()
    assert await cluster.replica.workflows.advancer.advance_batch() == 0
    resume.set()
    ended = await until(lambda: run_ended(cluster, run), what="the end of the run")
    assert ended.state == state
    outputs = [step.output for step in ended.steps if step.output is not None]
    assert outputs == (["hello", "got hello"] if state == "SUCCEEDED" else [])


class UnavailableChecker:
    """A checker that always raises."""

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
async def test_scan_timeout_follows_the_mode_of_the_topic(cluster, mode, output, state):
    cluster.rules([NO_SECRETS], mode=mode)
    cluster.replica.engine.scanner.checker = UnavailableChecker(TimeoutError())
    job = await cluster.submit("echo", "hello")
    await cluster.ended(job)
    await cluster.scanned()
    await cluster.state(job, state)
    [row] = await cluster.database.rows(FRAMES)
    assert row["output"] == output
    record = msgspec.json.decode(row["checks"])[-1]
    assert record["says"] == ("SKIPPED" if mode is OutputScanMode.PASS else "QUARANTINE")


async def test_scans_left_after_disabling_the_output_policy_block_nothing(cluster):
    scanner = cluster.replica.engine.scanner
    step = scanner.scan_due

    async def scan_nothing(_most=1):
        return 0

    scanner.scan_due = scan_nothing
    run = await start_workflow(cluster, "hello")
    await until(lambda: cluster.database.rows(SCANS), what="a scan")
    cluster.policy = None
    scanner.scan_due = step
    assert (await until(lambda: run_ended(cluster, run), what="the run ended")).state == "SUCCEEDED"


async def test_held_output_stays_held_while_the_checker_is_unavailable(cluster):
    cluster.rules([NO_SECRETS], mode=OutputScanMode.HOLD)
    checker = cluster.replica.engine.scanner.checker = UnavailableChecker(TimeoutError())
    job = await cluster.submit("echo", "hello")
    await cluster.ended(job)
    for asked in (1, 2):
        await until(lambda asked=asked: checker.asked >= asked, what="another check")
        [scan] = await until(lambda: waiting(cluster), what="the scan to be postponed")
        assert scan["unsettled"] == 0
        assert await values(cluster, job) == [(None, None, None, "held")]
        await cluster.database.run(OLD)
    await cluster.database.run(sql("DELETE FROM rota.scan"))


async def waiting(cluster):
    return [row for row in await cluster.database.rows(SCANS) if row["waits"] and not row["unsettled"]]


async def test_unavailable_checker_is_retried_within_the_time_limit(cluster):
    cluster.rules([NO_SECRETS])
    scanner = cluster.replica.engine.scanner
    there, scanner.checker = scanner.checker, UnavailableChecker(Unavailable("The kernel is away."))
    job = await cluster.submit("echo", SECRET)
    await until(lambda: waiting(cluster), what="the scan to be postponed")
    scanner.checker = there
    await cluster.database.run(DUE)
    await cluster.state(job, "OUTPUT_QUARANTINED")


async def test_output_that_crashes_its_scanners_is_not_scanned_forever(cluster):
    cluster.rules([NO_SECRETS], mode=OutputScanMode.FAIL_CLOSED)
    resume = pause_checkers(cluster)
    job = await cluster.submit("echo", "poison")
    await cluster.ended(job)
    [scan] = await until(
        lambda: cluster.database.rows(sql("SELECT token FROM rota.scan WHERE tries = 1")), what="a claim"
    )
    died = sql("UPDATE rota.scan SET ts_due = now(), tries = 4, unsettled = 3 WHERE token = $1::bigint")
    await cluster.database.run(died, scan["token"])
    resume.set()
    await cluster.scanned()
    await cluster.state(job, "OUTPUT_QUARANTINED")


async def test_metadata_check_exception_follows_the_mode_of_the_topic(cluster, monkeypatch):
    def broken(_self, _meta):
        raise RuntimeError("boom")

    monkeypatch.setattr(CompiledOutputPolicy, "check_metadata", broken)
    assert await cluster.ended(await cluster.submit("echo", "hello")) == "SUCCEEDED"
    cluster.rules([NO_SECRETS], mode=OutputScanMode.FAIL_CLOSED)
    assert await cluster.ended(await cluster.submit("echo", "hello")) == "OUTPUT_QUARANTINED"
    cluster.rules([NO_SECRETS], mode=OutputScanMode.HOLD)
    job = await cluster.submit("echo", "hello")
    assert await cluster.ended(job) == "SUCCEEDED"
    await cluster.scanned()


async def test_secret_in_an_error_text_is_never_stored(cluster):
    job = await cluster.submit("say", f"the key {SECRET} is wrong")
    assert await cluster.ended(job) == "FAILED"
    [row] = await cluster.database.rows(FRAMES)
    assert "[REDACTED]" in row["error"]
    assert SECRET not in row["error"]
    [failed] = await cluster.database.rows(sql("SELECT error FROM rota.done_entries"))
    assert SECRET not in failed["error"]


async def test_error_text_not_scanned_in_time_is_redacted(cluster, monkeypatch):
    monkeypatch.setattr("rota.engine.outputs.sync_check.ERROR_TEXT_BUDGET_S", -1.0)
    assert await cluster.ended(await cluster.submit("say", f"the key {SECRET} is wrong")) == "FAILED"
    [row] = await cluster.database.rows(FRAMES)
    assert row["error"] == "[REDACTED]"


async def test_nul_inside_a_secret_does_not_hide_it_in_an_error_text(cluster):
    job = await cluster.submit("say", f"the key {SECRET[:9]}\0{SECRET[9:]} is wrong")
    assert await cluster.ended(job) == "FAILED"
    [row] = await cluster.database.rows(FRAMES)
    assert SECRET not in row["error"]


async def test_releasing_a_quarantined_output_does_not_run_the_frame_again(cluster):
    job = await cluster.submit("echo", {"note": SECRET})
    await cluster.state(job, "OUTPUT_QUARANTINED")
    [line] = await review_page(cluster, state="quarantined")
    with pytest.raises(InvalidInput, match="A reason is required"):
        await review(cluster).release(line.id, ANN, " ")
    assert (await review(cluster).release(line.id, ANN, "A test key.")).changed
    assert not (await review(cluster).release(line.id, ANN, "A test key.")).changed
    done = await cluster.done(job)
    assert (done["state"], done["reason"]) == ("SUCCEEDED", None)
    assert (done["layers"][0]["succeeded"], done["layers"][0]["quarantined"]) == (1, 0)
    assert msgspec.msgpack.decode((await values(cluster, job))[0][0]) == {"note": SECRET}
    assert await cluster.database.rows(DEAD_LETTERS) == []
    assert [(entry["actor"], entry["action"]) for entry in await cluster.database.rows(AUDITED)] == [
        ("policy:output", "output.quarantine"),
        ("key:ann", "output.release"),
    ]
    assert [line.state for line in await review_page(cluster)] == ["released"]


async def test_reviewer_can_redact_a_quarantined_output(cluster):
    job = await cluster.submit("echo", {"note": f"see {SECRET}", "n": 1})
    await cluster.state(job, "OUTPUT_QUARANTINED")
    [line] = await review_page(cluster)
    assert (await review(cluster).redact(line.id, ANN, "Only the key.")).changed
    assert (await cluster.done(job))["state"] == "SUCCEEDED"
    assert msgspec.msgpack.decode((await values(cluster, job))[0][0]) == {"note": "see [REDACTED]", "n": 1}
    original = await review(cluster).content(line.id, ANN.audited)
    assert msgspec.msgpack.decode(original) == {"note": f"see {SECRET}", "n": 1}


async def test_release_racing_a_redaction_releases_the_original(cluster):
    job = await cluster.submit("echo", {"note": SECRET})
    await cluster.state(job, "OUTPUT_QUARANTINED")
    [line] = await review_page(cluster)
    late = review(cluster)
    read = late._row

    async def read_before_the_redaction(output):
        row = await read(output)
        assert (await review(cluster).redact(output, ANN, "Only the key.")).changed
        return row

    late._row = read_before_the_redaction
    assert (await late.release(line.id, ANN, "A test key.")).changed
    [(_, at, _, output)] = await values(cluster, job)
    assert (at is not None, output) == (True, None)
    assert msgspec.msgpack.decode(await cluster.replica.engine.store.get(at)) == {"note": SECRET}
    [layer] = (await cluster.done(job))["layers"]
    assert (layer["succeeded"], layer["quarantined"]) == (1, 0)


async def test_submitter_cannot_review_own_output(cluster):
    for who in ({"principal": "ann"}, {"actor_id": "ann"}):
        job = await cluster.submit("echo", SECRET, **who)
        await cluster.state(job, "OUTPUT_QUARANTINED")
        [line] = await review_page(cluster, job=job)
        for act in (review(cluster).release, review(cluster).redact):
            with pytest.raises(Forbidden, match="may not decide"):
                await act(line.id, ANN, "It is fine.")
        assert (await cluster.done(job))["state"] == "OUTPUT_QUARANTINED"


@pytest.mark.parametrize(("principal", "reviewer"), [("cli:ann", "bob"), ("bus:ann", "ann"), ("ann", "cli:ann")])
async def test_output_is_not_reviewed_unless_submitter_and_reviewer_are_principals(cluster, principal, reviewer):
    job = await cluster.submit("echo", SECRET, principal=principal)
    await cluster.state(job, "OUTPUT_QUARANTINED")
    [line] = await review_page(cluster, job=job)
    for act in (review(cluster).release, review(cluster).redact):
        with pytest.raises(Forbidden, match=r"without a key|is not a principal"):
            await act(line.id, OutputReviewer("x", Principal(reviewer)), "It is fine.")
    assert (await cluster.done(job))["state"] == "OUTPUT_QUARANTINED"


async def test_review_of_an_unknown_output_is_not_found(cluster):
    with pytest.raises(NotFound):
        await review(cluster).get(12345)
    with pytest.raises(NotFound):
        await review(cluster).release(-1, ANN, "Why not.")


async def test_job_with_quarantined_frames_succeeds_when_the_last_is_released(cluster):
    job = await cluster.submit("echo", SECRET, frames=3)
    await cluster.state(job, "OUTPUT_QUARANTINED")
    await cluster.scanned()
    assert (await cluster.done(job))["layers"][0]["quarantined"] == 3
    lines = await review_page(cluster, job=job)
    for number, line in enumerate(lines, 1):
        await review(cluster).release(line.id, ANN, "fine")
        expected = "SUCCEEDED" if number == 3 else "OUTPUT_QUARANTINED"
        assert (await cluster.done(job))["state"] == expected


async def test_quarantined_frame_of_a_running_job_makes_the_job_end_quarantined(cluster):
    gate = hanging("x")
    job = await cluster.submit_layers(("echo", SECRET), ("hang", "x"))
    await cluster.running("x")
    await until(
        lambda: cluster.database.value(sql("SELECT sum(quarantined) = 1 FROM rota.layer")), what="the count moved"
    )
    assert (await cluster.database.value(sql("SELECT sum(succeeded) FROM rota.layer"))) == 0
    gate.set()
    assert await cluster.ended(job) == "OUTPUT_QUARANTINED"


async def test_failed_job_stays_failed_when_a_scan_quarantines_its_output(cluster):
    resume = pause_checkers(cluster)
    job = await cluster.submit_layers(("echo", SECRET), ("boom",))
    assert await cluster.ended(job) == "FAILED"
    resume.set()
    await cluster.scanned()
    done = await cluster.done(job)
    assert done["state"] == "FAILED"
    assert sum(layer["quarantined"] for layer in done["layers"]) == 1


@asynccontextmanager
async def frame_ends_being_carried(cluster):
    """Retention has moved the ends of frames of live jobs, and commits when the block ends."""
    async with cluster.database.transaction() as tx:
        assert await tx.value(CARRY) == 1
        yield
        await until(lambda: cluster.database.value(BLOCKED), what="somebody who waits for the moved row")


async def a_held_output(cluster, given="hello"):
    """A job that is held by its scan while another layer runs; returns it, and what lets each of them go on."""
    cluster.rules([NO_SECRETS], mode=OutputScanMode.HOLD)
    resume, gate = pause_checkers(cluster), hanging("x")
    job = await cluster.submit_layers(("echo", given), ("hang", "x"))
    await until(lambda: cluster.database.rows(SCANS), what="the scan")
    return job, resume, gate


async def test_verdict_racing_the_move_of_a_frame_end_leaves_no_output_held(cluster):
    job, resume, gate = await a_held_output(cluster)
    async with frame_ends_being_carried(cluster):
        resume.set()
    await cluster.scanned()
    assert [(msgspec.msgpack.decode(value), output) for value, *_, output in await values(cluster, job)] == [
        ("hello", None)
    ]
    gate.set()
    assert await cluster.ended(job) == "SUCCEEDED"


async def test_quarantine_racing_the_move_of_a_frame_end_is_applied(cluster):
    job, resume, gate = await a_held_output(cluster, SECRET)
    async with frame_ends_being_carried(cluster):
        resume.set()
    await cluster.scanned()
    gate.set()
    assert await cluster.ended(job) == "OUTPUT_QUARANTINED"
    assert await values(cluster, job) == [(None, None, None, "quarantined")]


async def test_release_racing_the_move_of_a_frame_end_releases_it(cluster):
    job, resume, gate = await a_held_output(cluster)
    [line] = await review_page(cluster, state="held")
    async with frame_ends_being_carried(cluster):
        released = asyncio.create_task(review(cluster).release(line.id, ANN, "It is a test."))
    assert (await released).changed
    assert [output for *_, output in await values(cluster, job)] == [None]
    resume.set()
    gate.set()
    assert await cluster.ended(job) == "SUCCEEDED"


async def test_verdict_that_a_busy_database_refuses_is_applied_later(cluster, monkeypatch):
    """Refusals do not count as crashes of the scanner: after a few of those an output is not scanned for a day."""
    monkeypatch.setattr(async_scanner, "POLL_INTERVAL_S", 0.02)
    cluster.rules([NO_SECRETS], mode=OutputScanMode.HOLD)
    scanner = cluster.replica.engine.scanner
    apply, refusals = scanner.apply, iter(range(async_scanner.UNSETTLED_CLAIMS_MAX + 2))

    async def busy(verdicts):
        for _ in refusals:
            raise PostgresBusy("A lock is held.", sqlstate="55P03")
        return await apply(verdicts)

    scanner.apply = busy
    job = await cluster.submit("echo", "hello")
    await cluster.ended(job)
    await cluster.scanned()
    assert [msgspec.msgpack.decode(value) for value, *_ in await values(cluster, job)] == ["hello"]


async def test_scan_result_after_a_release_is_dropped(cluster):
    cluster.rules([NO_SECRETS], mode=OutputScanMode.HOLD)
    resume = pause_checkers(cluster)
    job = await cluster.submit("echo", SECRET)
    await cluster.ended(job)
    [line] = await until(lambda: review_page(cluster, state="held"), what="a held output")
    await until(lambda: cluster.database.rows(sql("SELECT FROM rota.scan WHERE tries = 1")), what="a claim")
    assert (await review(cluster).release(line.id, ANN, "It is known.")).changed
    resume.set()
    marker = await cluster.submit("echo", "another")
    await cluster.ended(marker)
    await cluster.scanned()
    assert (await cluster.done(job))["state"] == "SUCCEEDED"
    assert [output for *_, output in await values(cluster, job)] == [None]


async def test_job_cancelled_during_a_scan_stays_cancelled(cluster):
    gate = hanging("x")
    resume = pause_checkers(cluster)
    job = await cluster.submit_layers(("echo", SECRET), ("hang", "x"))
    await cluster.running("x")
    await until(lambda: cluster.database.rows(SCANS), what="a scan")
    await cluster.replica.engine.canceller.cancel(job, "test")
    assert await cluster.ended(job) == "CANCELLED"
    resume.set()
    await cluster.scanned()
    assert (await cluster.done(job))["state"] == "CANCELLED"
    assert [output for *_, output in await values(cluster, job)] == ["quarantined"]
    gate.set()


async def test_scan_result_applies_only_to_succeeded_frames(cluster):
    cluster.rules([NO_SECRETS], mode=OutputScanMode.HOLD)
    resume = pause_checkers(cluster)
    job = await cluster.submit("echo", SECRET)
    await cluster.ended(job)
    await until(lambda: cluster.database.rows(sql("SELECT FROM rota.scan WHERE tries = 1")), what="a claim")
    await cluster.database.run(sql("UPDATE rota.frame_end SET state = 'FAILED'"))
    resume.set()
    await cluster.scanned()
    [row] = await cluster.database.rows(FRAMES)
    assert (row["state"], row["output"]) == ("FAILED", "held")
    assert await cluster.database.rows(DEAD_LETTERS) == []
    assert (await cluster.done(job))["state"] == "SUCCEEDED"


async def test_concurrent_scan_claims_skip_locked_rows(cluster):
    scanner = cluster.replica.engine.scanner
    step = scanner.scan_due

    async def scan_nothing(_most=1):
        return 0

    scanner.scan_due = scan_nothing
    await cluster.ended(await cluster.submit("echo", "hello", frames=2))
    async with cluster.database.transaction() as first, cluster.database.transaction() as second:
        assert len(await first.rows(CLAIM, 1, 60.0)) == 1
        async with asyncio.timeout(5):
            assert len(await second.rows(CLAIM, 5, 60.0)) == 1
    await cluster.database.run(DUE)
    scanner.scan_due = step
    scanner.outputs.due.set()
    await cluster.scanned()


async def test_two_servers_scan_each_output_once(cluster):
    await cluster.server()
    seen = []
    for replica in cluster.replicas:
        checker = replica.engine.scanner.checker
        check = checker.check

        async def counted(meta, content, within_s, check=check):
            seen.append(meta.number)
            return await check(meta, content, within_s)

        checker.check = counted
    job = await cluster.submit("echo", SECRET, frames=200)
    await cluster.state(job, "OUTPUT_QUARANTINED")
    await cluster.scanned()
    assert sorted(seen) == list(range(200))
    assert (await cluster.done(job))["layers"][0]["quarantined"] == 200


async def test_scan_result_of_a_server_that_lost_its_claim_is_dropped(cluster):
    scanner = cluster.replica.engine.scanner
    resume = pause_checkers(cluster)
    job = await cluster.submit("echo", SECRET)
    await cluster.ended(job)
    await until(lambda: cluster.database.rows(sql("SELECT FROM rota.scan WHERE tries = 1")), what="a claim")
    await cluster.database.run(sql("UPDATE rota.scan SET tries = 2, ts_due = now() + interval '1 hour'"))
    resume.set()
    done = await cluster.submit("echo", "another")
    await cluster.ended(done)
    [left] = await until(lambda: one_scan(cluster), what="the first verdict dropped")
    assert left["tries"] == 2
    assert (await cluster.done(job))["state"] == "SUCCEEDED"
    await cluster.database.run(DUE)
    scanner.outputs.due.set()
    await cluster.state(job, "OUTPUT_QUARANTINED")


async def one_scan(cluster):
    rows = await cluster.database.rows(SCANS)
    return rows if len(rows) == 1 else None


async def test_without_an_output_policy_nothing_is_scanned(database_url, redis_url, nats_url, bus_prefix):
    from tests.support.replica_and_worker import Farm

    async with Farm(database_url, redis_url, nats_url, bus_prefix) as cluster:
        await cluster.show()
        await cluster.worker()
        assert cluster.replica.engine.finisher.outputs is None
        assert await cluster.ended(await cluster.submit("echo", SECRET)) == "SUCCEEDED"
        [row] = await cluster.database.rows(FRAMES)
        assert (row["output"], row["checks"]) == (None, None)
