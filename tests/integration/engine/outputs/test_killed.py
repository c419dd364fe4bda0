"""Kill -9 at every named place of looking into outputs and letting them out: whoever comes next does it, once."""

import asyncio

import msgspec
import pytest

from rota.engine.outputs.review import OutputReview, OutputReviewer
from rota.infra.failpoints import CRASH_EXIT_STATUS
from rota.model.policy.outputs import OutputEffect
from rota.policy.output.rules import OutputMatch, OutputRule
from tests.support.outputs import SECRET, Watched
from tests.support.queue import sessions_over, sql

CLIENT = "tests.integration.engine.outputs.outputs_client"
FRAMES = sql("SELECT token, state, output, value FROM rota.frame_end ORDER BY frame")
LETTERS = sql("SELECT count(*) FROM rota.dlq_entries")
AUDITED = sql("SELECT action FROM rota.audit WHERE action LIKE 'output.%' ORDER BY seq")
DUE = sql("UPDATE rota.scan SET ts_due = now()")
SCANS = sql("SELECT count(*) FROM rota.scan")


@pytest.fixture
async def farm(database_url, redis_url, nats_url, bus_prefix):
    async with Watched(database_url, redis_url, nats_url, bus_prefix) as farm:
        await farm.show()
        await farm.worker()
        yield farm


async def due(farm, frames=2):
    """A job whose outputs are due, and nobody here who looks at them."""

    async def nobody(_most=1):
        return 0

    scanner = farm.replica.engine.scanner
    farm.step, scanner.scan_due = scanner.scan_due, nobody
    job = await farm.submit("echo", {"note": SECRET}, frames=frames)
    assert await farm.ended(job) == "SUCCEEDED"
    assert await farm.database.value(SCANS) == frames
    return job


async def scanned(farm, says):
    """All that is due is looked at, here and now."""
    await farm.database.run(DUE)
    farm.rules([OutputRule(id="r", decision=says, match=OutputMatch(scanners=("secret",)))])
    while await farm.step():
        pass


async def client(farm, spawn, database_url, *words, **env):
    process = await spawn(CLIENT, *words, env={"URL": database_url, **env})
    status = await process.wait()
    await sessions_over(farm.database)
    return status


@pytest.mark.parametrize(
    "place", ["outputs.after_claim", "outputs.after_look", "outputs.before_commit", "outputs.after_commit"]
)
async def test_a_scan_outlives_whoever_looks(farm, spawn, database_url, place):
    job = await due(farm)
    assert await client(farm, spawn, database_url, "scan", "quarantine", CRASH_AT=place) == CRASH_EXIT_STATUS
    await scanned(farm, OutputEffect.QUARANTINE)
    done = await farm.done(job)
    assert (done["state"], done["layers"][0]["quarantined"]) == ("OUTPUT_QUARANTINED", 2)
    assert [row["output"] for row in await farm.database.rows(FRAMES)] == ["quarantined"] * 2
    assert await farm.database.value(LETTERS) == 2
    assert [row["action"] for row in await farm.database.rows(AUDITED)] == ["output.quarantine"] * 2
    assert await farm.database.value(SCANS) == 0


@pytest.mark.parametrize("place", ["outputs.after_redacted", "outputs.before_commit"])
async def test_a_redaction_is_whole_or_not_at_all(farm, spawn, database_url, place):
    await due(farm)
    assert await client(farm, spawn, database_url, "scan", "redact", CRASH_AT=place) == CRASH_EXIT_STATUS
    assert [row["output"] for row in await farm.database.rows(FRAMES)] == [None, None]
    await scanned(farm, OutputEffect.REDACT)
    rows = await farm.database.rows(FRAMES)
    assert [(row["output"], msgspec.msgpack.decode(row["value"])) for row in rows] == [
        ("redacted", {"note": "[REDACTED]"})
    ] * 2


@pytest.mark.parametrize(
    ("act", "place", "output"),
    [
        ("release", "outputs.after_stop", None),
        ("release", "outputs.before_release_commit", None),
        ("redact", "outputs.before_release_commit", "redacted"),
    ],
)
async def test_a_release_that_is_interrupted_has_not_happened(farm, spawn, database_url, act, place, output):
    job = await due(farm, frames=1)
    await scanned(farm, OutputEffect.QUARANTINE)
    desk = OutputReview(farm.database, farm.replica.engine.store, farm.replica.queue)
    [line] = await desk.page()
    assert await client(farm, spawn, database_url, act, str(line.id), CRASH_AT=place) == CRASH_EXIT_STATUS
    assert (await farm.done(job))["state"] == "OUTPUT_QUARANTINED"
    assert (await getattr(desk, act)(line.id, OutputReviewer("bob", ("bob",)), "fine")).changed
    assert (await farm.done(job))["state"] == "SUCCEEDED"
    [row] = await farm.database.rows(FRAMES)
    assert row["output"] == output
    assert await farm.database.value(LETTERS) == 0


async def test_two_who_release_at_once_release_once(farm):
    await due(farm, frames=1)
    await scanned(farm, OutputEffect.QUARANTINE)
    [row] = await farm.database.rows(FRAMES)
    desk = OutputReview(farm.database, farm.replica.engine.store, farm.replica.queue)
    both = [desk.release(row["token"], OutputReviewer(name, (name,)), "fine") for name in ("ann", "bob")]
    assert sorted(told.changed for told in await asyncio.gather(*both)) == [False, True]
    acts = [entry["action"] for entry in await farm.database.rows(AUDITED)]
    assert acts == ["output.quarantine", "output.release"]
