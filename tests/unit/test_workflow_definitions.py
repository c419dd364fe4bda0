"""What a definition may say, and what is refused with a sentence."""

import time

import pytest

from rota.model.errors import InvalidInput
from rota.model.workflow import LoopSpec, ParallelSpec, StepSpec, SwitchSpec, WorkflowSpec, decode, encode
from rota.model.workflow_check import compiled
from rota.model.workflow_words import Failed, expression, template


def job(name, *before, **more):
    return StepSpec(id=name, task="work", depends_on=before, **more)


def flow(*steps, **more):
    return compiled(WorkflowSpec(name="flow", steps=steps, **more))


REFUSED = {
    "no step": ([], "0 steps"),
    "two of one name": ([job("a"), job("a")], "two steps a"),
    "a bad name": ([job("a b")], "cannot name a step"),
    "unknown step": ([job("a", "b")], "depends on 'b', and there is no such step"),
    "itself": ([job("a", "a")], "itself"),
    "a circle": ([job("a", "c"), job("b", "a"), job("c", "b")], "in a circle"),
    "a circle through a parallel": (
        [
            StepSpec(id="p", type="parallel", parallel=ParallelSpec(steps=("m",))),
            job("m", "after"),
            job("after", "p"),
        ],
        "in a circle",
    ),
    "a circle through a handler": ([job("a", on_error="h"), job("b", "a"), job("h", "b")], "in a circle"),
    "a member that waits for its parallel": (
        [StepSpec(id="p", type="parallel", parallel=ParallelSpec(steps=("m",))), job("m", "p")],
        "Step m waits for what ends after it",
    ),
    "a member that waits for what comes after a parallel around its own": (
        [
            StepSpec(id="p", type="parallel", parallel=ParallelSpec(steps=("q",))),
            StepSpec(id="q", type="parallel", parallel=ParallelSpec(steps=("m",))),
            job("m", "after"),
            job("after", "p"),
        ],
        "m, after wait for each other in a circle",
    ),
    "a handler that waits for what it handles": (
        [job("a", on_error="h"), job("h", "a")],
        "Step h waits for what ends after it",
    ),
    "neither task nor argv": ([StepSpec(id="a")], "either a task or an argv"),
    "a field of another type": ([job("a", delay_sec=3)], "no use for delay_sec"),
    "a delay of nothing": ([StepSpec(id="a", type="delay")], "either delay_sec or delay_until"),
    "a delay that is negative": ([StepSpec(id="a", type="delay", delay_sec=-1)], "seconds from 0"),
    "a moment without a zone": ([StepSpec(id="a", type="delay", delay_until="2026-01-01T00:00")], "a moment such as"),
    "more than there are": (
        [StepSpec(id="p", type="parallel", parallel=ParallelSpec(steps=("a",), need=2)), job("a")],
        "needs 2 of 1",
    ),
    "two owners": (
        [
            StepSpec(id="p", type="parallel", parallel=ParallelSpec(steps=("a",))),
            StepSpec(id="s", type="switch", switch=SwitchSpec(on="1", cases={"1": ("a",)})),
            job("a"),
        ],
        "belongs to both",
    ),
    "too many items": ([job("a", for_each=list(range(10_001)))], "10001 items"),
    "a loop without a bound": ([job("a", loop=LoopSpec(most=10**9))], "may go round"),
    "a loop over items": ([job("a", loop=LoopSpec(), for_each=[1])], "a loop and for_each"),
    "an expression that cannot be read": ([job("a", when="1 +")], "cannot be read"),
    "an expression without an end": ([job("a", input={"x": "${input.n"})], "has no end"),
    "an expression that loops in a loop": ([job("a", when="[1].all(x, [2].all(y, x == y))")], "loops inside a loop"),
    "an unknown name": ([job("a", when="nobody == 1")], "names 'nobody'"),
    "an expression of an unknown step": ([job("a", input={"x": "${steps.b.output}"})], "names step 'b'"),
    "a step that need not have ended": ([job("a"), job("b", input={"x": "${steps.a.output}"})], "need not have ended"),
    "a bad task": ([job("a", cores=-1)], "Step a: "),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_could_never_run_is_refused(what):
    steps, sentence = REFUSED[what]
    with pytest.raises(InvalidInput) as refused:
        flow(*steps)
    assert sentence in refused.value.sentence


def test_an_input_that_the_workflow_does_not_have_is_refused():
    with pytest.raises(InvalidInput, match=r"names input\.m"):
        flow(job("a", input={"x": "${input.m}"}), inputs={"n": 1})


def test_a_definition_survives_its_way_through_json():
    spec = WorkflowSpec(
        name="flow",
        steps=(
            StepSpec(id="s", type="switch", switch=SwitchSpec(on="1", cases={"1": ("a",)}, default=())),
            job("a", retry=3, loop=LoopSpec(while_="round.index < 2")),
        ),
        inputs={"n": 1},
    )
    assert decode(encode(spec)) == spec
    assert encode(decode(encode(spec))) == encode(spec)


def test_a_text_that_is_one_expression_keeps_its_type():
    scope = {"input": {"n": 2, "list": [1, {"k": "v"}]}}
    made = template({"n": "${input.n}", "more": ["${input.n + 1}", "n=${input.n} $${x}"], "plain": 1}, "it")
    assert made(scope) == {"n": 2, "more": [3, "n=2 ${x}"], "plain": 1}
    assert template("${input.list[1].k}", "it")(scope) == "v"
    assert template("${'}' + input.list[1].k}", "it")(scope) == "}v"
    assert template({"plain": ["x"]}, "it") is None


def test_an_expression_without_a_value_says_so():
    for text in ("input.missing", "input.n + 'x'", "input.list[9]"):
        with pytest.raises(Failed, match="no value"):
            expression(text, "it")({"input": {"n": 1, "list": []}})


def test_an_expression_over_a_long_list_is_refused_and_a_large_one_ends_soon():
    loop = expression("input.list.map(x, x * 2).size() > 0 && input.list.all(x, x >= 0)", "it")
    with pytest.raises(Failed, match="10001"):
        loop({"input": {"list": list(range(10_001))}})
    began = time.process_time()
    assert loop({"input": {"list": list(range(10_000))}}) is True
    assert time.process_time() - began < 5
    with pytest.raises(InvalidInput, match="9 loops"):
        expression(" && ".join(["[1].all(x, true)"] * 9), "it")
    with pytest.raises(InvalidInput, match=r"cannot be read|characters"):
        expression("(" * 4000, "it")


def test_what_goes_without_saying_makes_no_other_definition():
    spec = WorkflowSpec(name="flow", steps=(job("a", retry=3),))
    said = job("a", retry=3, timeout_s=float("0"), kill_after_s=float("5"), cores=1.0, labels={}, topic="")
    assert encode(WorkflowSpec(name="flow", steps=(said,), timeout_s=float("0"), priority=5)) == encode(spec)
    assert encode(WorkflowSpec(name="flow", steps=(job("a", retry=4),))) != encode(spec)
