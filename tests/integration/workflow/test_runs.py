"""Runs of workflows on real servers: what steps do, what they pass on, and how runs end."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from rota.model.errors import IdempotencyConflict, InvalidInput, NotFound
from rota.model.workflows.spec import LoopSpec, ParallelSpec, StepSpec, SwitchSpec, WorkflowSpec
from rota.workflow.run_queries import RunQueries
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm, hanging, seen
from tests.support.waiting import until

NEWS = sql("SELECT (SELECT count(*) FROM rota.workflow_news) + (SELECT count(*) FROM rota.workflow_timer) AS left")


OUTBOX = sql("""
SELECT CASE WHEN EXISTS (SELECT FROM rota.outbox_parked) THEN 'parked'
            WHEN NOT EXISTS (SELECT FROM rota.outbox) THEN 'left' END""")


class Works:
    """A farm and what is asked of its workflows."""

    def __init__(self, farm):
        self.farm = farm
        self.desk = farm.replica.workflows
        self.looking = RunQueries(farm.database)

    async def declare(self, *steps, name="flow", **more):
        return await self.desk.declare(WorkflowSpec(name=name, show="film", steps=steps, **more), "ann")

    async def run(self, *steps, given=None, **more):
        """The run of a workflow of these steps, once it has ended."""
        await self.declare(*steps, **more)
        started = await self.desk.start("film", more.get("name", "flow"), given, actor="ann")
        return await self.ended(started.run)

    async def ended(self, run):
        async def over():
            found = await self.looking.get(run)
            return found if found.state.ended else None

        return await until(over, within_s=20, what=f"the end of run {run}")


def states(run):
    return {step.id: step.state.value for step in run.steps}


def outputs(run):
    return {step.id: step.output for step in run.steps if step.output is not None}


@pytest.fixture
async def works(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as farm:
        await farm.show()
        await farm.worker()
        yield Works(farm)
        await farm.quiet()
        await until(lambda: nothing_left(farm), what="no news and no timers")


async def nothing_left(farm):
    return await farm.database.value(NEWS) == 0


async def test_steps_run_in_order_and_hand_on_what_they_return(works):
    run = await works.run(
        StepSpec(id="a", task="square", args=("${input.n}",)),
        StepSpec(id="b", task="square", args=("${steps.a.output + 1}",), depends_on=("a",)),
        inputs={"n": 3},
        output={"total": "${steps.b.output}", "text": "n was ${input.n}"},
        given={"n": 2},
    )
    assert (run.state, outputs(run), run.output) == ("SUCCEEDED", {"a": 4, "b": 25}, {"total": 25, "text": "n was 2"})
    told = [(moment.happened.what, moment.happened.step) for moment in await works.looking.timeline(run.id)]
    assert told == [
        *(("began", ""), ("began", "a"), ("succeeded", "a")),
        *(("began", "b"), ("succeeded", "b"), ("succeeded", "")),
    ]


async def test_a_for_each_runs_once_for_each_item_and_returns_a_list(works):
    run = await works.run(
        StepSpec(id="all", task="square", args=("${item}",), for_each="${input.items}", max_parallel=2),
        StepSpec(id="none", task="square", args=("${item}",), for_each=[]),
        given={"items": [1, 2, 3, 4, 5]},
    )
    assert (run.state, outputs(run)) == ("SUCCEEDED", {"all": [1, 4, 9, 16, 25], "none": []})


async def test_a_failing_step_fails_the_run_and_stops_what_else_runs(works):
    hanging("slow")
    await works.declare(
        StepSpec(id="slow", task="hang", args=("slow",)),
        StepSpec(id="bad", task="boom"),
        StepSpec(id="never", task="noop", depends_on=("bad",)),
    )
    started = await works.desk.start("film", "flow", actor="ann")
    run = await works.ended(started.run)
    assert run.state == "FAILED"
    assert states(run) == {"slow": "CANCELLED", "bad": "FAILED", "never": "CANCELLED"}
    assert "no luck" in run.error


async def test_an_error_that_is_handled_lets_the_run_go_on(works):
    run = await works.run(
        StepSpec(id="bad", task="boom", on_error="mend"),
        StepSpec(id="mend", task="echo", args=("mended: ${steps.bad.error}",)),
        StepSpec(id="after", task="noop", depends_on=("bad",)),
    )
    assert run.state == "SUCCEEDED"
    assert states(run) == {"bad": "FAILED", "mend": "SUCCEEDED", "after": "SUCCEEDED"}
    assert "no luck" in outputs(run)["mend"]


async def test_a_switch_takes_one_way_and_passes_over_the_others(works):
    run = await works.run(
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


async def test_the_first_of_several_is_enough_and_the_others_are_stopped(works):
    hanging("loser")
    run = await works.run(
        StepSpec(id="race", type="parallel", parallel=ParallelSpec(steps=("fast", "loser"), need="any")),
        StepSpec(id="fast", task="noop"),
        StepSpec(id="loser", task="hang", args=("loser",)),
        StepSpec(id="after", task="noop", depends_on=("race",)),
    )
    assert run.state == "SUCCEEDED"
    assert states(run) == {"race": "SUCCEEDED", "fast": "SUCCEEDED", "loser": "CANCELLED", "after": "SUCCEEDED"}


async def test_a_loop_goes_round_until_it_is_done_and_no_further_than_its_bound(works):
    until_big = LoopSpec(until="round.output > 10", most=5)
    run = await works.run(
        StepSpec(id="grow", task="square", args=("${round.index + 2}",), loop=until_big),
        StepSpec(id="bounded", task="noop", depends_on=("grow",), loop=LoopSpec(until="false", most=3)),
    )
    assert (states(run), outputs(run)) == ({"grow": "SUCCEEDED", "bounded": "FAILED"}, {"grow": 16})
    assert "3 rounds" in run.error


async def test_two_delays_of_one_run_both_fire_and_neither_early(works):
    moment = datetime.now(UTC) + timedelta(milliseconds=400)
    run = await works.run(
        StepSpec(id="short", type="delay", delay_sec=0.2),
        StepSpec(id="moment", type="delay", delay_until="${input.at}"),
        StepSpec(id="past", type="delay", delay_until="2020-01-01T00:00:00Z"),
        given={"at": moment.isoformat()},
    )
    assert run.state == "SUCCEEDED"
    at = {(m.happened.step, m.happened.what): m.at for m in await works.looking.timeline(run.id)}
    assert at["short", "succeeded"] - run.started_at >= timedelta(milliseconds=199)
    assert at["moment", "succeeded"] >= moment
    assert at["past", "succeeded"] < at["short", "succeeded"]


async def test_what_is_told_goes_out_on_the_bus(works):
    run = await works.run(StepSpec(id="say", type="notify", notify="n is ${input.n}"), given={"n": 3})
    assert run.state == "SUCCEEDED"
    told = await until(lambda: works.farm.database.value(OUTBOX), what="the message to leave the outbox")
    assert told == "left", "it was published, and not put aside"


async def test_a_step_may_run_another_workflow(works):
    await works.declare(
        StepSpec(id="inner", task="square", args=("${input.n}",)),
        name="inner",
        output={"squared": "${steps.inner.output}"},
    )
    run = await works.run(
        StepSpec(id="sub", type="workflow", workflow="inner", input={"n": "${input.n}"}),
        StepSpec(id="after", task="echo", args=("${steps.sub.output.squared}",), depends_on=("sub",)),
        given={"n": 4},
    )
    assert (run.state, outputs(run)) == ("SUCCEEDED", {"sub": {"squared": 16}, "after": 16})
    [sub, _] = run.steps
    assert (await works.looking.get(sub.job)).parent == run.id


async def test_a_workflow_that_starts_itself_is_stopped_at_a_depth(works):
    run = await works.run(StepSpec(id="me", type="workflow", workflow="flow"))
    assert run.state == "FAILED"
    assert len(await works.looking.page(workflow="flow", most=100)) == 17


async def test_a_run_that_takes_too_long_times_out(works):
    hanging("slow")
    run = await works.run(StepSpec(id="slow", task="hang", args=("slow",)), timeout_s=0.3)
    assert (run.state, states(run)) == ("TIMEOUT", {"slow": "CANCELLED"})


async def test_a_cancelled_run_stops_what_it_runs_with_what_that_has_started(works):
    hanging("deep")
    await works.declare(StepSpec(id="deep", task="hang", args=("deep",)), name="inner")
    await works.declare(StepSpec(id="sub", type="workflow", workflow="inner"))
    started = await works.desk.start("film", "flow", actor="ann")
    await works.farm.running("deep")
    assert await works.desk.cancel(started.run, "bob")
    run = await works.ended(started.run)
    assert (run.state, run.error) == ("CANCELLED", "Cancelled by bob.")
    assert (await works.looking.get(run.steps[0].job)).state == "CANCELLED"
    assert not await works.desk.cancel(started.run, "bob")


async def test_a_paused_run_begins_nothing_until_it_is_resumed(works):
    gate = hanging("first")
    await works.declare(
        StepSpec(id="first", task="hang", args=("first",)), StepSpec(id="second", task="noop", depends_on=("first",))
    )
    started = await works.desk.start("film", "flow", actor="ann")
    await works.farm.running("first")
    assert await works.desk.pause(started.run, "ann")
    gate.set()

    async def first_is_done():
        return states(await works.looking.get(started.run))["first"] == "SUCCEEDED"

    await until(first_is_done)
    run = await works.looking.get(started.run)
    assert (run.state, states(run)["second"]) == ("PAUSED", "WAITING")
    assert await works.desk.resume(started.run, "ann")
    assert (await works.ended(started.run)).state == "SUCCEEDED"


async def test_a_rerun_takes_over_what_came_before(works):
    failing = (
        StepSpec(id="a", task="square", args=(3,)),
        StepSpec(id="b", task="flaky", args=(99,), depends_on=("a",)),
        StepSpec(id="c", task="echo", args=("${steps.a.output}",), depends_on=("b",)),
    )
    first = await works.run(*failing)
    assert first.state == "FAILED"
    seen.clear()
    again = await works.desk.rerun(first.id, "b", "ann")
    run = await works.ended(again.run)
    assert states(run) == {"a": "SUCCEEDED", "b": "FAILED", "c": "CANCELLED"}
    assert "square" not in seen
    run = await works.ended((await works.desk.rerun(first.id, "c", "ann")).run)
    assert run.state == "FAILED", "what never succeeded runs again, wherever it is"


async def test_a_key_starts_one_run(works):
    await works.declare(StepSpec(id="a", task="noop"))
    one = await works.desk.start("film", "flow", {"n": 1}, actor="ann", key="k")
    two = await works.desk.start("film", "flow", {"n": 1}, actor="ann", key="k")
    assert (one.run, one.already, two.already) == (two.run, False, True)
    with pytest.raises(IdempotencyConflict):
        await works.desk.start("film", "flow", {"n": 2}, actor="ann", key="k")
    await works.ended(one.run)


async def test_a_definition_that_changes_leaves_its_runs_alone(works):
    gate = hanging("first")
    first = StepSpec(id="first", task="hang", args=("first",))
    await works.declare(first, StepSpec(id="second", task="echo", args=("old",), depends_on=("first",)))
    started = await works.desk.start("film", "flow", actor="ann")
    version = await works.declare(first, StepSpec(id="second", task="echo", args=("new",), depends_on=("first",)))
    assert version.version == 2
    gate.set()
    run = await works.ended(started.run)
    assert (run.version, outputs(run)["second"]) == (1, "old")


async def test_what_cannot_be_submitted_fails_its_own_run_and_no_other(works):
    await works.declare(StepSpec(id="a", task="noop"), StepSpec(id="b", task="noop", depends_on=("a",)), name="good")
    await works.declare(
        StepSpec(id="a", task="noop"), StepSpec(id="b", task="noop", depends_on=("a",)), name="bad", dept="no"
    )
    good = await works.desk.start("film", "good", actor="ann")
    bad = await works.desk.start("film", "bad", actor="ann")
    assert (await works.ended(good.run)).state == "SUCCEEDED"
    run = await works.ended(bad.run)
    assert run.state == "FAILED"
    assert "'no'" in run.error


async def test_what_is_asked_for_in_vain_is_refused_with_a_sentence(works):
    with pytest.raises(NotFound, match="no workflow 'flow'"):
        await works.desk.start("film", "flow", actor="ann")
    await works.declare(StepSpec(id="a", task="noop"), inputs={"n": {"required": True}})
    with pytest.raises(InvalidInput, match="requires the input n"):
        await works.desk.start("film", "flow", actor="ann")
    with pytest.raises(InvalidInput, match="no input 'm'"):
        await works.desk.start("film", "flow", {"n": 1, "m": 2}, actor="ann")
    run = await works.run(StepSpec(id="a", task="echo", args=("${input.list[7]}",)), name="late", given={"list": []})
    assert (run.state, "no value" in run.error) == ("FAILED", True)


async def test_many_runs_at_once_keep_to_themselves(works):
    await works.declare(
        StepSpec(id="a", task="square", args=("${input.n}",)),
        StepSpec(id="b", task="echo", args=("${steps.a.output}",), depends_on=("a",)),
        output={"n": "${steps.b.output}"},
    )
    started = await works.desk.start_many("film", "flow", [{"n": n} for n in range(100)], actor="ann")
    runs = await asyncio.gather(*(works.ended(each.run) for each in started))
    assert [run.output["n"] for run in runs] == [n * n for n in range(100)]
