"""Explain: every reason why a job does not run, with amounts, holders and the command that helps."""

from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from rota.accounting import allocations
from rota.engine.admission.decision import DeferAll
from rota.engine.completion.canceller import END_AS
from rota.engine.dispatch.metrics import WAITING_FRAMES, WAITING_JOBS
from rota.engine.explain.explainer import Explainer
from rota.engine.recovery.retention import RetentionMaintenance
from rota.engine.submission.submitter import Submitter
from rota.infra.lease import Leases
from rota.model.errors import InvalidInput
from rota.model.jobs.submission import LayerSpec, Submission
from rota.model.protocol import AttemptResult, AttemptStatus
from rota.model.settings import Settings
from tests.support.dispatch import Rig
from tests.support.jobs import NO_EVENTS, task
from tests.support.queue import sql

TOKENS = sql("SELECT token, pk_host FROM rota.proc WHERE pk_job = $1::uuid ORDER BY token")
NO_LEASE = sql("DELETE FROM rota.lease")
STARTED = sql("""
UPDATE rota.job SET history = history || jsonb_build_array(jsonb_build_array(
  'DISPATCHED', floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint - 40000, NULL)) WHERE pk_job = $1::uuid""")
DISPATCH_FAILED = sql("""
UPDATE rota.job SET dispatch_failures = 2, dispatch_error = 'publish_failed',
  ts_dispatch_retry = now() + make_interval(secs => $2) WHERE pk_job = $1::uuid""")


@pytest.fixture
async def rig(database, redis):
    rig = await Rig(database, redis).open()
    await rig.show("film", {"farm": 4}, managed=True)
    rig.route({"*": ("farm",)})
    return rig


def codes(explanation):
    return [reason.code for reason in explanation.reasons]


async def test_explain_quota_limit_gives_amounts_and_holders(rig):
    rig.beat("w", capabilities=("task.noop",))
    first = await rig.submit("film", frames=3, name="beauty")
    await rig.turn()
    job = await rig.submit("film", cores=2, frames=5)
    explanation = await rig.explainer.explain(job)
    [reason] = explanation.reasons
    assert (reason.tier, reason.code, reason.layer) == ("quota", "quota_subscription", "noop")
    assert (reason.refuser.kind, reason.refuser.name) == ("subscription", "film in farm")
    assert msgspec.structs.astuple(reason.amounts) == ("cores", 3, 2, 4)
    [holder] = reason.holders
    assert (holder.kind, holder.id, holder.name, holder.frames, holder.cores) == ("job", first, "beauty", 3, 3)
    assert "`rota sub set film farm --burst 5` raises the limit" in reason.remedy
    assert reason.next_try
    assert explanation.sentence == reason.sentence
    assert (explanation.known_by, explanation.not_known) == ("server", "")


async def test_explain_release_lost_by_a_dead_server_says_that_the_live_count_is_above_the_record(rig):
    rig.beat("w", capabilities=("task.noop",))
    first = await rig.submit("film", frames=4)
    await rig.turn()
    job = await rig.submit("film")
    [full] = (await rig.explainer.explain(job)).reasons
    assert "raises the limit" in full.remedy
    [show] = await rig.accounting.admin.shows()
    tokens = [row["token"] for row in await rig.database.rows(TOKENS, first)]
    await allocations.delete(rig.database, show.id, tokens[:3])  # ended in PostgreSQL, not released in Redis
    [reason] = (await rig.explainer.explain(job)).reasons
    assert (reason.code, reason.amounts.have) == ("quota_subscription", 4)
    assert "uses 4 of 4 cores by the live count, which is 3 above the record of 1" in reason.sentence
    assert "within 5 s" in reason.remedy
    assert "burst" not in reason.remedy
    assert await rig.accounting.release_lost() == 3
    assert (await rig.explainer.explain(job)).reasons == ()


async def test_explain_used_up_subscription_lists_the_workers_of_the_next_pool(rig):
    await rig.pool("spare")
    await rig._change("create_subscription", "film", "spare", size=50, burst=50)
    rig.route({"*": ("farm", "spare")})
    rig.beat("near", capabilities=("task.noop",))
    rig.beat("far", pool="spare", slots=1, capabilities=("task.noop",))
    job = await rig.submit("film", frames=9)
    assert (await rig.explainer.explain(job)).layers[0].starts == 5
    await rig.settle()
    explanation = await rig.explainer.explain(job)
    assert (codes(explanation), explanation.layers[0].refused_by) == (
        ["quota_subscription", "pool_overloaded"],
        "pool_overloaded",
    )
    assert [each.name for each in explanation.reasons[1].passed] == ["far"]


async def test_explain_dependent_job_lists_the_jobs_it_waits_for(rig):
    sim = await rig.submit("film", name="water")
    await rig.show("other", {"farm": 50})
    foreign = await rig.submit("other", name="secret")
    job = await rig.submit("film", job={"after": (sim, foreign), "after_failed": "fail"})
    explanation = await rig.explainer.explain(job)
    [reason] = [each for each in explanation.reasons if each.tier == "blocked"]
    assert reason.code == "waiting_on_job"
    assert [(each.id, each.name, each.state, each.if_failed) for each in reason.waits_for] == [
        (sim, "water", "SCHEDULED", "fail"),
        (foreign, str(foreign), "SCHEDULED", "fail"),
    ]
    assert reason.sentence == f"It waits for 2 jobs to end: water (SCHEDULED), {foreign} (SCHEDULED)."
    assert f"`rota explain {sim}`" in reason.remedy
    assert explanation.layers[0].starts == 0


async def test_explain_full_workers_gives_a_reason_per_worker_and_the_holding_show(rig):
    rig.beat("small", slots=1, capabilities=("task.noop",))
    rig.beat("old", capabilities=())
    running = await rig.submit("film")
    await rig.turn()
    explanation = await rig.explainer.explain(await rig.submit("film"))
    [reason] = explanation.reasons
    assert (reason.tier, reason.code, reason.considered) == ("capacity", "pool_overloaded", 2)
    assert {each.name: each.why for each in reason.passed} == {
        "small": "its 1 slots are in use",
        "old": "it does not know the task noop",
    }
    assert [(holder.kind, holder.name, holder.frames) for holder in reason.holders] == [("show", "film", 1)]
    [run] = (await rig.explainer.explain(running)).running
    assert (run.layer, run.frames) == ("noop", 1)


async def test_explain_unknown_task_comes_before_other_reasons(rig):
    rig.beat("w", capabilities=("task.other",))
    await rig._change("change_subscription", "film", "farm", burst=0)
    explanation = await rig.explainer.explain(await rig.submit("film"))
    assert codes(explanation) == ["unknown_task", "quota_subscription"]
    assert explanation.layers[0].refused_by == "no_workers"
    rig.route({"other": ("farm",)})
    explanation = await rig.explainer.explain(await rig.submit("film"))
    assert codes(explanation) == ["no_pool_mapping"]
    assert "`rota pool map default POOL`" in explanation.reasons[0].remedy


async def test_explain_counts_the_frames_ahead(rig):
    rig.beat("w", slots=2, capabilities=("task.noop",))
    for _ in range(5):
        await rig.submit("film")
    low = await rig.submit("film", job={"priority": "BATCH"})
    last = await rig.submit("film")
    for _ in range(2):
        await rig.turn()
    explanation = await rig.explainer.explain(last)
    assert codes(explanation) == ["pool_overloaded", "behind"]
    assert explanation.layers[0].position.ahead == 3
    before = (await rig.explainer.explain(low)).layers[0].position
    assert (before.ahead, before.queues_before, before.frames_before) == (0, 1, 4)


async def test_explain_counts_a_turn_of_each_job_ahead(rig):
    """Jobs of a queue take turns, so not all frames of a long one are ahead of a short one."""
    rig.beat("w", slots=1, capabilities=("task.noop",))
    await rig.submit("film", frames=10_000)
    await rig.submit("film", frames=3)
    last = await rig.submit("film")
    assert (await rig.explainer.explain(last)).layers[0].position.ahead == 64 + 3
    started = []
    while not await rig.started(last):
        started.append((await rig.explainer.explain(last)).layers[0].position.ahead)
        rig.beat("w", slots=len(started) + 1, capabilities=("task.noop",))
        await rig.turn()
    assert started == [67, 3, 0], "each slot that becomes free goes to the next job"


async def test_explain_fair_share_puts_shows_with_lower_usage_first(rig):
    rig.beat("w", slots=1, capabilities=("task.noop",))
    await rig.show("other", {"farm": 50})
    await rig.submit("film")
    await rig.turn()
    job = await rig.submit("film")
    waiting = await rig.submit("other", frames=3)
    for _ in range(2):
        await rig.turn()
    explanation = await rig.explainer.explain(job)
    assert codes(explanation) == ["pool_overloaded", "fair_share"]
    assert explanation.reasons[1].sentence.startswith("3 frames of other shows come first")
    assert codes(await rig.explainer.explain(waiting)) == ["pool_overloaded"]


async def test_explain_start_estimate_uses_recent_ends_and_is_otherwise_unknown(rig):
    rig.beat("w", slots=2, capabilities=("task.noop",))
    job = await rig.submit("film", frames=8)
    await rig.turn()
    estimate = (await rig.explainer.explain(job)).layers[0].start
    assert (estimate.in_s, estimate.basis) == (None, "too little work of the show ended within the last hour")
    for _ in range(2):
        await end(rig, job, [AttemptStatus.SUCCEEDED, AttemptStatus.SUCCEEDED])
        await rig.turn()
    await rig.database.run(STARTED, job)
    estimate = (await rig.explainer.explain(job)).layers[0].start
    assert estimate.in_s == pytest.approx(10, abs=1)
    assert estimate.basis.startswith("4 frames of it ended within the last 4")


async def end(rig, job, statuses, **more):
    rows = await rig.database.rows(TOKENS, job)
    for row, status in zip(rows, statuses, strict=True):
        fields = more if status is AttemptStatus.FAILED else {}
        ended = await rig.dispatcher.finisher.finish_attempts(
            {row["pk_host"]: [AttemptResult(row["token"], status, **fields)]}
        )
        rig.registry.release_allocations(row["pk_host"], ended.freed[row["pk_host"]])
        for show, deleted in ended.released.items():
            rig.dispatcher.frames_released(show, deleted.by_job(), deleted.by_pool())


async def test_explain_ended_job_names_its_first_failed_frame(rig):
    rig.beat("w", capabilities=("task.noop",))
    job = await rig.submit("film", frames="10-14x2")
    await rig.turn()
    failed = {"code": "exception", "error": "no luck"}
    await end(rig, job, [AttemptStatus.SUCCEEDED, AttemptStatus.FAILED, AttemptStatus.FAILED], **failed)
    explanation = await rig.explainer.explain(job)
    first = explanation.first_failure
    assert (explanation.state, first.layer, first.frame, first.attempt, first.code) == (
        "FAILED",
        "noop",
        12,
        1,
        "exception",
    )
    assert explanation.sentence.startswith("It has ended as FAILED")
    assert "Frame 12 of noop failed first (exception: no luck)." in explanation.sentence


async def test_explain_deferred_job_gives_its_start_time(rig):
    rig.beat("w", capabilities=("task.noop",))
    at = datetime.now(UTC) + timedelta(hours=1)
    explanation = await rig.explainer.explain(await rig.submit("film", job={"run_at": at}))
    [reason] = explanation.reasons
    assert (reason.tier, reason.code, reason.next_at) == ("blocked", "deferred", at)
    assert explanation.layers[0].start.in_s == pytest.approx(3600, abs=60)


async def test_explain_job_without_a_gate_decision_is_policy_pending(rig):
    [submitted] = await Submitter(rig.database, NO_EVENTS, gate=DeferAll()).submit([task()])
    explanation = await rig.explainer.explain(submitted.job)
    assert codes(explanation)[0] == "policy_pending"
    assert explanation.layers[0].start.in_s is None


async def test_explain_job_being_cancelled_gives_its_final_state(rig):
    job = await rig.submit("film")
    await rig.database.row(END_AS, job, "CANCELLED", "cancelled")
    explanation = await rig.explainer.explain(job)
    assert codes(explanation) == ["ending"]
    assert "being ended as CANCELLED (cancelled)" in explanation.sentence


async def test_explain_job_over_the_show_limit_names_the_running_jobs(rig):
    rig.beat("w", capabilities=("task.noop",))
    await rig._change("change_show", "film", max_jobs=1)
    first = await rig.submit("film", name="beauty")
    await rig.turn()
    second = await rig.submit("film")
    for _ in range(2):  # while it is in its lane, and once it is parked
        explanation = await rig.explainer.explain(second)
        [reason] = explanation.reasons
        assert (reason.code, reason.amounts.have, reason.amounts.limit) == ("tenant_limit", 1, 1)
        assert [(holder.id, holder.name) for holder in reason.holders] == [(first, "beauty")]
        assert "`rota show set film --max-jobs 2`" in reason.remedy
        await rig.turn()
    assert explanation.layers[0].refused_by == "tenant_limit"


async def test_explain_lists_unavailable_servers_last(rig, redis):
    rig.beat("w", capabilities=("task.noop",))
    job = await rig.submit("film")
    assert codes(await rig.explainer.explain(job)) == []
    await redis.flushdb()
    assert codes(await rig.explainer.explain(job)) == ["books_unavailable"]
    rig.bus.connected = False
    assert codes(await rig.explainer.explain(job)) == ["bus_unavailable", "books_unavailable"]
    await rig.database.run(DISPATCH_FAILED, job, 60.0)
    await rig.database.run(NO_LEASE)
    explanation = await rig.explainer.explain(job)
    assert codes(explanation) == ["dispatch_failed", "no_server", "books_unavailable"]
    assert "failed 2 times (publish_failed)" in explanation.reasons[0].sentence
    assert explanation.layers[0].starts == 0


async def test_explain_forgets_a_failed_dispatch_once_it_is_retried(rig):
    rig.beat("w", capabilities=("task.noop",))
    job = await rig.submit("film")
    await rig.database.run(DISPATCH_FAILED, job, 60.0)
    [reason] = (await rig.explainer.explain(job)).reasons
    assert (reason.code, reason.next_at is not None) == ("dispatch_failed", True)
    await rig.database.run(DISPATCH_FAILED, job, 0.0)
    assert codes(await rig.explainer.explain(job)) == []


async def test_explain_of_one_layer_omits_others_and_an_unknown_layer_is_refused(rig):
    rig.beat("w", cores=200, capabilities=("task.noop",))
    layers = (LayerSpec(name="small", task="noop"), LayerSpec(name="large", task="noop", cores=64))
    [job] = [each.job for each in await rig.submitter.submit([Submission(show="film", layers=layers)])]
    whole = await rig.explainer.explain(job)
    assert [(layer.name, layer.starts) for layer in whole.layers] == [("small", 1), ("large", 0)]
    alone = await rig.explainer.explain(job, layer="large")
    assert ([layer.name for layer in alone.layers], codes(alone)) == (["large"], ["quota_subscription", "no_workers"])
    with pytest.raises(InvalidInput, match="has no layer 'huge': it has small, large"):
        await rig.explainer.explain(job, layer="huge")


async def test_explain_from_postgres_alone_says_what_it_cannot_see(rig):
    await rig.submit("film")
    job = await rig.submit("film", cores=8)
    explanation = await Explainer(rig.database).explain(job)
    assert explanation.known_by == "postgres"
    assert "load of machines" in explanation.not_known
    assert codes(explanation)[0] == "no_pool_mapping"  # the routes of the rig are not in PostgreSQL


async def test_waiting_gauges_count_by_reason(rig):
    await rig.submit("film", frames=7)
    await Submitter(rig.database, NO_EVENTS, gate=DeferAll()).submit([task()])
    await rig.turn()
    await rig.turn()
    assert value(WAITING_FRAMES, "no_workers") == 7
    assert value(WAITING_FRAMES, "queued") == 0
    await RetentionMaintenance(rig.database, Leases(rig.database), Settings().retention).measure(None)
    assert value(WAITING_JOBS, "policy_pending") == 1
    assert value(WAITING_JOBS, "tenant_limit") == 0


def value(gauge, reason):
    return gauge.labels(reason)._value.get()


async def test_explain_is_not_affected_by_a_worker_freed_while_it_runs(rig):
    rig.beat("w", slots=4, capabilities=("task.noop",))
    await rig.submit("film", frames=4)
    await rig.turn()
    job = await rig.submit("film")
    read = rig.explainer._queries.limit_holders

    async def free_meanwhile(*asked):
        rig.beat("w", slots=100, capabilities=("task.noop",))
        return await read(*asked)

    rig.explainer._queries.limit_holders = free_meanwhile
    explanation = await rig.explainer.explain(job)
    assert codes(explanation) == ["quota_subscription", "pool_overloaded"]
