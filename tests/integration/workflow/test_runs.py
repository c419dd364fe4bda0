"""Workflow runs on real servers: what steps do, the values they pass on, and how runs end."""

from datetime import UTC, datetime, timedelta

import pytest

from rota.model.errors import IdempotencyConflict, InvalidInput, NotFound
from rota.model.workflows.spec import LoopSpec, ParallelSpec, StepSpec, SwitchSpec, WorkflowSpec
from rota.workflow.run_queries import RunQueries
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm, hanging, seen
from tests.support.waiting import until

UNPROCESSED = sql(
    "SELECT (SELECT count(*) FROM rota.workflow_news) + (SELECT count(*) FROM rota.workflow_timer) AS left"
)


OUTBOX = sql("""
SELECT CASE WHEN EXISTS (SELECT FROM rota.outbox_parked) THEN 'parked'
            WHEN NOT EXISTS (SELECT FROM rota.outbox) THEN 'left' END""")


class WorkflowClient:
    """The workflow commands and queries of a replica."""

    def __init__(self, farm):
        self.farm = farm
        self.commands = farm.replica.workflows
        self.queries = RunQueries(farm.database)

    async def declare(self, *steps, name="flow", **more):
        return await self.commands.declare(WorkflowSpec(name=name, show="film", steps=steps, **more), "ann")

    async def run(self, *steps, given=None, **more):
        """The run of a workflow of these steps, once it has ended."""
        await self.declare(*steps, **more)
        started = await self.commands.start("film", more.get("name", "flow"), given, actor="ann")
        return await self.ended(started.run)

    async def ended(self, run):
        async def ended_run():
            found = await self.queries.get(run)
            return found if found.state.ended else None

        return await until(ended_run, within_s=20, what=f"the end of run {run}")


def states(run):
    return {step.id: step.state.value for step in run.steps}


def outputs(run):
    return {step.id: step.output for step in run.steps if step.output is not None}


@pytest.fixture
async def workflows(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as farm:
        await farm.show()
        await farm.worker()
        yield WorkflowClient(farm)
        await farm.quiet()
        await until(lambda: nothing_left(farm), what="an empty inbox without timers")


async def nothing_left(farm):
    return await farm.database.value(UNPROCESSED) == 0


async def test_steps_run_in_order_and_pass_on_their_outputs(workflows):
    run = await workflows.run(
        StepSpec(id="a", task="square", args=("${input.n}",)),
        StepSpec(id="b", task="square", args=("${steps.a.output + 1}",), depends_on=("a",)),
        inputs={"n": 3},
        output={"total": "${steps.b.output}", "text": "n was ${input.n}"},
        given={"n": 2},
    )
    assert (run.state, outputs(run), run.output) == ("SUCCEEDED", {"a": 4, "b": 25}, {"total": 25, "text": "n was 2"})
    observed = [(moment.happened.what, moment.happened.step) for moment in await workflows.queries.timeline(run.id)]
    assert observed == [
        *(("began", ""), ("began", "a"), ("succeeded", "a")),
        *(("began", "b"), ("succeeded", "b"), ("succeeded", "")),
    ]


async def test_for_each_runs_every_item_and_returns_a_list(workflows):
    run = await workflows.run(
        StepSpec(id="all", task="square", args=("${item}",), for_each="${input.items}", max_parallel=2),
        StepSpec(id="none", task="square", args=("${item}",), for_each=[]),
        given={"items": [1, 2, 3, 4, 5]},
    )
    assert (run.state, outputs(run)) == ("SUCCEEDED", {"all": [1, 4, 9, 16, 25], "none": []})


async def test_failed_step_fails_the_run_and_stops_running_steps(workflows):
    hanging("slow")
    await workflows.declare(
        StepSpec(id="slow", task="hang", args=("slow",)),
        StepSpec(id="bad", task="boom"),
        StepSpec(id="never", task="noop", depends_on=("bad",)),
    )
    started = await workflows.commands.start("film", "flow", actor="ann")
    run = await workflows.ended(started.run)
    assert run.state == "FAILED"
    assert states(run) == {"slow": "CANCELLED", "bad": "FAILED", "never": "CANCELLED"}
    assert "no luck" in run.error


async def test_handled_error_lets_the_run_continue(workflows):
    run = await workflows.run(
        StepSpec(id="bad", task="boom", on_error="mend"),
        StepSpec(id="mend", task="echo", args=("mended: ${steps.bad.error}",)),
        StepSpec(id="after", task="noop", depends_on=("bad",)),
    )
    assert run.state == "SUCCEEDED"
    assert states(run) == {"bad": "FAILED", "mend": "SUCCEEDED", "after": "SUCCEEDED"}
    assert "no luck" in outputs(run)["mend"]


async def test_switch_runs_one_branch_and_skips_the_others(workflows):
    run = await workflows.run(
        StepSpec(
            id="which",
            type="switch",
            switch=SwitchSpec(on="input.n > 1", cases={"true": ("big",), "false": ("small",)}),
        ),
        StepSpec(id="big", task="noop"),
        StepSpec(id="small", task="boom"),
        StepSpec(id="after_small", task="boom", depends_on=("small",)),
        StepSpec(id="join", task="noop", depends_on=("big", "after_small")),
        given={"n": 2},
    )
    assert run.state == "SUCCEEDED"
    assert states(run) == {
        "which": "SUCCEEDED",
        "big": "SUCCEEDED",
        "small": "PASSED",
        "after_small": "PASSED",
        "join": "SUCCEEDED",
    }


async def test_any_parallel_ends_with_the_first_and_stops_the_others(workflows):
    hanging("loser")
    run = await workflows.run(
        StepSpec(id="race", type="parallel", parallel=ParallelSpec(steps=("fast", "loser"), need="any")),
        StepSpec(id="fast", task="noop"),
        StepSpec(id="loser", task="hang", args=("loser",)),
        StepSpec(id="after", task="noop", depends_on=("race",)),
    )
    assert run.state == "SUCCEEDED"
    assert states(run) == {"race": "SUCCEEDED", "fast": "SUCCEEDED", "loser": "CANCELLED", "after": "SUCCEEDED"}


async def test_loop_ends_on_its_condition_or_fails_at_its_bound(workflows):
    until_big = LoopSpec(until="round.output > 10", most=5)
    run = await workflows.run(
        StepSpec(id="grow", task="square", args=("${round.index + 2}",), loop=until_big),
        StepSpec(id="bounded", task="noop", depends_on=("grow",), loop=LoopSpec(until="false", most=3)),
    )
    assert (states(run), outputs(run)) == ({"grow": "SUCCEEDED", "bounded": "FAILED"}, {"grow": 16})
    assert "3 rounds" in run.error


async def test_two_delays_of_one_run_both_fire_and_not_early(workflows):
    moment = datetime.now(UTC) + timedelta(milliseconds=400)
    run = await workflows.run(
        StepSpec(id="short", type="delay", delay_sec=0.2),
        StepSpec(id="moment", type="delay", delay_until="${input.at}"),
        StepSpec(id="past", type="delay", delay_until="2020-01-01T00:00:00Z"),
        given={"at": moment.isoformat()},
    )
    assert run.state == "SUCCEEDED"
    at = {(m.happened.step, m.happened.what): m.at for m in await workflows.queries.timeline(run.id)}
    assert at["short", "succeeded"] - run.started_at >= timedelta(milliseconds=199)
    assert at["moment", "succeeded"] >= moment
    assert at["past", "succeeded"] < at["short", "succeeded"]


async def test_notify_message_is_published_on_the_bus(workflows):
    run = await workflows.run(StepSpec(id="say", type="notify", notify="n is ${input.n}"), given={"n": 3})
    assert run.state == "SUCCEEDED"
    observed = await until(lambda: workflows.farm.database.value(OUTBOX), what="the publication of the message")
    assert observed == "left", "it was published, not parked"


async def test_step_runs_a_nested_workflow(workflows):
    await workflows.declare(
        StepSpec(id="inner", task="square", args=("${input.n}",)),
        name="inner",
        output={"squared": "${steps.inner.output}"},
    )
    run = await workflows.run(
        StepSpec(id="sub", type="workflow", workflow="inner", input={"n": "${input.n}"}),
        StepSpec(id="after", task="echo", args=("${steps.sub.output.squared}",), depends_on=("sub",)),
        given={"n": 4},
    )
    assert (run.state, outputs(run)) == ("SUCCEEDED", {"sub": {"squared": 16}, "after": 16})
    [sub, _] = run.steps
    assert (await workflows.queries.get(sub.job)).parent == run.id


async def test_recursive_workflow_is_stopped_at_the_depth_limit(workflows):
    run = await workflows.run(StepSpec(id="me", type="workflow", workflow="flow"))
    assert run.state == "FAILED"
    assert len(await workflows.queries.page(workflow="flow", most=100)) == 17


async def test_run_over_its_timeout_times_out(workflows):
    hanging("slow")
    run = await workflows.run(StepSpec(id="slow", task="hang", args=("slow",)), timeout_s=0.3)
    assert (run.state, states(run)) == ("TIMEOUT", {"slow": "CANCELLED"})


async def test_cancelled_run_stops_its_steps_and_nested_runs(workflows):
    hanging("deep")
    await workflows.declare(StepSpec(id="deep", task="hang", args=("deep",)), name="inner")
    await workflows.declare(StepSpec(id="sub", type="workflow", workflow="inner"))
    started = await workflows.commands.start("film", "flow", actor="ann")
    await workflows.farm.running("deep")
    assert await workflows.commands.cancel(started.run, "bob")
    run = await workflows.ended(started.run)
    assert (run.state, run.error) == ("CANCELLED", "Cancelled by bob.")
    assert (await workflows.queries.get(run.steps[0].job)).state == "CANCELLED"
    assert not await workflows.commands.cancel(started.run, "bob")


async def test_paused_run_starts_no_step_until_resumed(workflows):
    gate = hanging("first")
    await workflows.declare(
        StepSpec(id="first", task="hang", args=("first",)), StepSpec(id="second", task="noop", depends_on=("first",))
    )
    started = await workflows.commands.start("film", "flow", actor="ann")
    await workflows.farm.running("first")
    assert await workflows.commands.pause(started.run, "ann")
    gate.set()

    async def first_is_done():
        return states(await workflows.queries.get(started.run))["first"] == "SUCCEEDED"

    await until(first_is_done)
    run = await workflows.queries.get(started.run)
    assert (run.state, states(run)["second"]) == ("PAUSED", "WAITING")
    assert await workflows.commands.resume(started.run, "ann")
    assert (await workflows.ended(started.run)).state == "SUCCEEDED"


async def test_rerun_keeps_results_of_earlier_steps(workflows):
    failing = (
        StepSpec(id="a", task="square", args=(3,)),
        StepSpec(id="b", task="flaky", args=(99,), depends_on=("a",)),
        StepSpec(id="c", task="echo", args=("${steps.a.output}",), depends_on=("b",)),
    )
    first = await workflows.run(*failing)
    assert first.state == "FAILED"
    seen.clear()
    again = await workflows.commands.rerun(first.id, "b", "ann")
    run = await workflows.ended(again.run)
    assert states(run) == {"a": "SUCCEEDED", "b": "FAILED", "c": "CANCELLED"}
    assert "square" not in seen
    run = await workflows.ended((await workflows.commands.rerun(first.id, "c", "ann")).run)
    assert run.state == "FAILED", "a step that never succeeded runs again"


async def test_same_idempotency_key_starts_one_run(workflows):
    await workflows.declare(StepSpec(id="a", task="noop"))
    one = await workflows.commands.start("film", "flow", {"n": 1}, actor="ann", key="k")
    two = await workflows.commands.start("film", "flow", {"n": 1}, actor="ann", key="k")
    assert (one.run, one.already, two.already) == (two.run, False, True)
    with pytest.raises(IdempotencyConflict):
        await workflows.commands.start("film", "flow", {"n": 2}, actor="ann", key="k")
    await workflows.ended(one.run)


async def test_new_definition_version_leaves_existing_runs_unchanged(workflows):
    gate = hanging("first")
    first = StepSpec(id="first", task="hang", args=("first",))
    await workflows.declare(first, StepSpec(id="second", task="echo", args=("old",), depends_on=("first",)))
    started = await workflows.commands.start("film", "flow", actor="ann")
    version = await workflows.declare(first, StepSpec(id="second", task="echo", args=("new",), depends_on=("first",)))
    assert version.version == 2
    gate.set()
    run = await workflows.ended(started.run)
    assert (run.version, outputs(run)["second"]) == (1, "old")


async def test_unsubmittable_step_fails_only_its_run(workflows):
    await workflows.declare(
        StepSpec(id="a", task="noop"), StepSpec(id="b", task="noop", depends_on=("a",)), name="good"
    )
    await workflows.declare(
        StepSpec(id="a", task="noop"), StepSpec(id="b", task="noop", depends_on=("a",)), name="bad", dept="no"
    )
    good = await workflows.commands.start("film", "good", actor="ann")
    bad = await workflows.commands.start("film", "bad", actor="ann")
    assert (await workflows.ended(good.run)).state == "SUCCEEDED"
    run = await workflows.ended(bad.run)
    assert run.state == "FAILED"
    assert "'no'" in run.error


async def test_invalid_start_or_reference_is_refused_with_a_sentence(workflows):
    with pytest.raises(NotFound, match="no workflow 'flow'"):
        await workflows.commands.start("film", "flow", actor="ann")
    await workflows.declare(StepSpec(id="a", task="noop"), inputs={"n": {"required": True}})
    with pytest.raises(InvalidInput, match="requires the input n"):
        await workflows.commands.start("film", "flow", actor="ann")
    with pytest.raises(InvalidInput, match="no input 'm'"):
        await workflows.commands.start("film", "flow", {"n": 1, "m": 2}, actor="ann")
    run = await workflows.run(
        StepSpec(id="a", task="echo", args=("${input.list[7]}",)), name="late", given={"list": []}
    )
    assert (run.state, "no value" in run.error) == ("FAILED", True)


async def test_concurrent_runs_are_independent(workflows):
    await workflows.declare(
        StepSpec(id="a", task="square", args=("${input.n}",)),
        StepSpec(id="b", task="echo", args=("${steps.a.output}",), depends_on=("a",)),
        output={"n": "${steps.b.output}"},
    )
    started = await workflows.commands.start_many("film", "flow", [{"n": n} for n in range(100)], actor="ann")
    runs = [await workflows.ended(each.run) for each in started]
    assert [run.output["n"] for run in runs] == [n * n for n in range(100)]
