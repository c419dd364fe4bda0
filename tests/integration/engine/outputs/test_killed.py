"""Crashes at every failpoint of scanning and releasing outputs: the next process completes the work once."""

import asyncio

import msgspec
import pytest

from rota.engine.outputs.review import OutputReview, OutputReviewer
from rota.infra.failpoints import CRASH_EXIT_STATUS
from rota.model.identity.principals import Principal
from rota.model.policy.outputs import OutputEffect
from rota.policy.output.rules import OutputMatch, OutputRule
from tests.support.jobs import completions
from tests.support.outputs import SECRET, OutputPolicyFarm
from tests.support.queue import sessions_over, sql

CLIENT = "tests.integration.engine.outputs.outputs_client"
FRAMES = sql("SELECT token, state, output, value FROM rota.frame_end ORDER BY frame")
DEAD_LETTERS = sql("SELECT count(*) FROM rota.dlq_entries")
AUDITED = sql("SELECT action FROM rota.audit WHERE action LIKE 'output.%' ORDER BY seq")
DUE = sql("UPDATE rota.scan SET ts_due = now()")
SCANS = sql("SELECT count(*) FROM rota.scan")


@pytest.fixture
async def cluster(database_url, redis_url, nats_url, bus_prefix):
    async with OutputPolicyFarm(database_url, redis_url, nats_url, bus_prefix) as cluster:
        await cluster.show()
        await cluster.worker()
        yield cluster


async def job_with_due_scans(cluster, frames=2):
    """A job whose outputs are due for a scan, with the scanner of this replica disabled."""

    async def scan_nothing(_most=1):
        return 0

    scanner = cluster.replica.engine.scanner
    cluster.step, scanner.scan_due = scanner.scan_due, scan_nothing
    job = await cluster.submit("echo", {"note": SECRET}, frames=frames)
    assert await cluster.ended(job) == "SUCCEEDED"
    assert await cluster.database.value(SCANS) == frames
    return job


async def scan_all_due(cluster, effect):
    """Scan everything that is due in this process."""
    await cluster.database.run(DUE)
    cluster.rules([OutputRule(id="r", decision=effect, match=OutputMatch(scanners=("secret",)))])
    while await cluster.step():
        pass


async def run_client(cluster, spawn, database_url, *args, **env):
    process = await spawn(CLIENT, *args, env={"URL": database_url, **env})
    status = await process.wait()
    await sessions_over(cluster.database)
    return status


@pytest.mark.parametrize(
    "failpoint", ["outputs.after_claim", "outputs.after_look", "outputs.before_commit", "outputs.after_commit"]
)
async def test_crash_during_a_scan_leaves_it_to_the_next_scanner(cluster, spawn, database_url, failpoint):
    job = await job_with_due_scans(cluster)
    assert await run_client(cluster, spawn, database_url, "scan", "quarantine", CRASH_AT=failpoint) == CRASH_EXIT_STATUS
    await scan_all_due(cluster, OutputEffect.QUARANTINE)
    done = await cluster.done(job)
    assert (done["state"], done["layers"][0]["quarantined"]) == ("OUTPUT_QUARANTINED", 2)
    assert [row["output"] for row in await cluster.database.rows(FRAMES)] == ["quarantined"] * 2
    assert await cluster.database.value(DEAD_LETTERS) == 2
    assert [row["action"] for row in await cluster.database.rows(AUDITED)] == ["output.quarantine"] * 2
    assert await cluster.database.value(SCANS) == 0


@pytest.mark.parametrize("failpoint", ["outputs.after_redacted", "outputs.before_commit"])
async def test_crash_during_a_redaction_leaves_no_partial_redaction(cluster, spawn, database_url, failpoint):
    await job_with_due_scans(cluster)
    assert await run_client(cluster, spawn, database_url, "scan", "redact", CRASH_AT=failpoint) == CRASH_EXIT_STATUS
    assert [row["output"] for row in await cluster.database.rows(FRAMES)] == [None, None]
    await scan_all_due(cluster, OutputEffect.REDACT)
    rows = await cluster.database.rows(FRAMES)
    assert [(row["output"], msgspec.msgpack.decode(row["value"])) for row in rows] == [
        ("redacted", {"note": "[REDACTED]"})
    ] * 2


@pytest.mark.parametrize(
    ("act", "failpoint", "output"),
    [
        ("release", "outputs.after_stop", None),
        ("release", "outputs.before_release_commit", None),
        ("redact", "outputs.before_release_commit", "redacted"),
    ],
)
async def test_crash_during_a_release_leaves_the_output_quarantined(
    cluster, spawn, database_url, act, failpoint, output
):
    job = await job_with_due_scans(cluster, frames=1)
    await scan_all_due(cluster, OutputEffect.QUARANTINE)
    review = OutputReview(
        cluster.database, cluster.replica.engine.store, cluster.replica.queue, completions(cluster.database)
    )
    [line] = await review.page()
    assert await run_client(cluster, spawn, database_url, act, str(line.id), CRASH_AT=failpoint) == CRASH_EXIT_STATUS
    assert (await cluster.done(job))["state"] == "OUTPUT_QUARANTINED"
    assert (await getattr(review, act)(line.id, OutputReviewer("bob", Principal("bob")), "fine")).changed
    assert (await cluster.done(job))["state"] == "SUCCEEDED"
    [row] = await cluster.database.rows(FRAMES)
    assert row["output"] == output
    assert await cluster.database.value(DEAD_LETTERS) == 0


async def test_concurrent_releases_release_once(cluster):
    await job_with_due_scans(cluster, frames=1)
    await scan_all_due(cluster, OutputEffect.QUARANTINE)
    [row] = await cluster.database.rows(FRAMES)
    review = OutputReview(
        cluster.database, cluster.replica.engine.store, cluster.replica.queue, completions(cluster.database)
    )
    both = [review.release(row["token"], OutputReviewer(name, Principal(name)), "fine") for name in ("ann", "bob")]
    assert sorted(result.changed for result in await asyncio.gather(*both)) == [False, True]
    acts = [entry["action"] for entry in await cluster.database.rows(AUDITED)]
    assert acts == ["output.quarantine", "output.release"]
