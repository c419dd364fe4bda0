"""Explain and dispatch agree: the dispatcher does what explain predicted for a job."""

from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from rota.model.quota import Level
from rota.model.reasons import Reason, Tier
from rota.placement import PoolStatus
from tests.support.dispatch import Rig
from tests.support.harness.effort import effort
from tests.support.queue import sql

DONE = sql("SELECT reason FROM rota.job_done WHERE pk_job = $1::uuid")
WHY = sql("SELECT reason FROM rota.job WHERE pk_job = $1::uuid")

FEW = st.sampled_from([0, 1, 2, 3])
CAPS = st.fixed_dictionaries({"max_cores": st.sampled_from([1, 2, 4, None]), "max_gpus": st.sampled_from([None, 1])})
FIT = st.fixed_dictionaries(
    {
        "pool": st.sampled_from(["farm", "farm", "spare"]),
        "slots": st.sampled_from([0, 1, 3]),
        "cores": st.sampled_from([200, 300, 1000]),
        "gpus": st.sampled_from([2, 0]),
        "memory_mb": st.sampled_from([3000, 0]),
        "labels": st.sampled_from([{"node.disk": "ssd"}, {}]),
        "capabilities": st.just(("task.noop",)),
    }
)
UNFIT = st.fixed_dictionaries(
    {
        "pool": st.sampled_from(["farm", "elsewhere"]),
        "cores": st.sampled_from([50, 1000]),
        "capabilities": st.sampled_from([("task.noop",), ("task.other",)]),
        "draining": st.booleans(),
    }
)
ALWAYS = {
    "managed": st.booleans(),
    "before": st.integers(0, 3),
    "frames": st.integers(1, 6),
    "fit": st.lists(FIT, min_size=1, max_size=4),
}
USUAL = {
    "shares": {"farm": 20, "spare": 20},
    "folder": {},
    "point": None,
    "jobs": -1,
    "pools": ("farm", "spare"),
    "drained": None,
    "unfit": [],
    "deserted": False,
    "others": 0,
    "need": {},
    "job_cap": None,
    "layer_cap": None,
    "labels": {},
    "forgotten": False,
    "paused": False,
}
ODD = {
    "shares": st.fixed_dictionaries({}, optional={"farm": FEW, "spare": FEW}),
    "folder": CAPS,
    "point": CAPS,
    "jobs": FEW,
    "pools": st.sampled_from([("farm",), ("spare", "farm"), ("spare",), ()]),
    "drained": st.just("farm"),
    "unfit": st.lists(UNFIT, max_size=2),
    "deserted": st.just(True),
    "others": FEW,
    "need": st.sampled_from([{"cores": 0.5}, {"cores": 2}, {"cores": 0, "gpus": 1}, {"gpus": 1}, {"memory": "2GiB"}]),
    "job_cap": st.sampled_from([1, 2]),
    "layer_cap": st.sampled_from([1, 3]),
    "labels": st.sampled_from([{"node.disk": "ssd"}, {"preferred_pool": "spare"}]),
    "forgotten": st.just(True),
    "paused": st.just(True),
}
FIRST = ("folder", "forgotten", "job_cap", "layer_cap", "point", "shares")
# One limit or an emptied Redis plus a few other oddities: if everything is odd, one refusal hides the others.
SETUP = st.tuples(st.sampled_from(FIRST), st.sets(st.sampled_from(sorted(ODD)), max_size=3)).flatmap(
    lambda names: st.fixed_dictionaries({**ALWAYS, **{name: ODD[name] for name in sorted({names[0], *names[1]})}})
)


# Frames refused by the subscription of the first pool start in the second, besides those routed there.
TWO_POOLS = {
    "managed": True,
    "before": 0,
    "frames": 5,
    "fit": [
        {"pool": pool, "slots": slots, "capabilities": ("task.noop",)} for pool, slots in (("farm", 2), ("spare", 5))
    ],
    "shares": {"farm": 1, "spare": 20},
}


async def arrange(rig, redis, given):
    """Sets up the drawn case, with some frames running already; returns the job to explain."""
    for pool in ("farm", "spare", "elsewhere"):
        await rig.pool(pool)
    caps = {"folder": given["folder"], "point": given["point"], "jobs": given["jobs"]}
    await rig.show("film", given["shares"], managed=given["managed"], **caps)
    await rig.show("other", {"farm": 50, "spare": 50})
    drained = {given["drained"]: PoolStatus.DRAINING} if given["drained"] else {}
    rig.route({"before": ("farm", "spare"), **({"shot": given["pools"]} if given["pools"] else {})}, **drained)
    for number, heartbeat in enumerate([*given["unfit"], *([] if given["deserted"] else given["fit"])]):
        rig.beat(f"w{number}", **heartbeat)
    for show, frames in (("film", given["before"]), ("other", given["others"])):
        if frames:
            job = await rig.submit(show, topic="before", frames=frames)
            await rig.turn()
            await rig.queue.cancel_waiting(job)
    if given["forgotten"] and given["managed"]:
        await redis.flushdb()
    # Submission refuses a cap below the need of one frame.
    least = given["need"].get("cores", 1)
    job_cap, layer_cap = (cap and max(cap, least) for cap in (given["job_cap"], given["layer_cap"]))
    job = await rig.submit(
        "film",
        topic="shot",
        labels=given["labels"],
        job={"max_cores": job_cap},
        frames=given["frames"],
        max_cores=layer_cap,
        **given["need"],
    )
    if given["paused"]:
        await rig.queue.pause((await rig.explainer.jobs.get(job)).layers[0].queue)
    return job


async def refused_by(rig, job):
    """The reason with which dispatch finally refused frames of the job, if any; a full subscription only redirects."""
    done = await rig.database.row(DONE, job)
    if done is not None:
        return Reason(done["reason"])
    if final := [each for each in rig.accounting.refusals if each.table is not Level.SUBSCRIPTION]:
        return Reason.of_level(final[0].table)
    if await rig.is_parked(job):
        return Reason(await rig.database.value(WHY, job))
    pending = [queue for queue in rig.pending_queues.entries.values() if queue.key.cls.topic == "shot"]
    return next((queue.reason for queue in pending if queue.reason), None)


@settings(
    max_examples=effort(25, 600),
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # no shrinking: it takes minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(SETUP)
@example(TWO_POOLS)
async def test_dispatch_matches_the_explanation(database, redis, given):
    given = {**USUAL, **given}
    rig = await Rig(database, redis).open()
    job = await arrange(rig, redis, given)
    rig.dispatcher.reset_backoffs()  # what it remembers of earlier refusals lasts for a second
    explanation = await rig.explainer.explain(job)
    [layer] = explanation.layers
    await rig.settle()
    assert await rig.started(job) == layer.starts, explanation
    if given["paused"]:
        assert (layer.starts, explanation.reasons[0].tier.rank <= Tier.BLOCKED.rank) == (0, True)
        return
    assert await refused_by(rig, job) == layer.refused_by, explanation
    codes = [reason.code for reason in explanation.reasons]
    if layer.starts == given["frames"]:
        assert codes == []
    elif not layer.starts:
        same = {Reason.UNKNOWN_TASK: Reason.NO_WORKERS}
        assert layer.refused_by in [same.get(code, code) for code in codes], explanation
    ranks = [reason.tier.rank for reason in explanation.reasons]
    assert ranks == sorted(ranks)
