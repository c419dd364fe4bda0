"""What a definition may say, and what is refused with a sentence."""

import time

import pytest

from rota.model.errors import InvalidInput
from rota.model.jobs.submission import Compensation
from rota.model.workflows import compiler
from rota.model.workflows.cel import METER_KEY, CostMeter
from rota.model.workflows.compiler import compile_workflow
from rota.model.workflows.expressions import ExpressionError, compile_expression, compile_template
from rota.model.workflows.spec import (
    LoopSpec,
    ParallelSpec,
    StepSpec,
    SwitchSpec,
    WorkflowSpec,
    decode_workflow,
    encode_workflow,
)


def job(name, *before, **more):
    return StepSpec(id=name, task="work", depends_on=before, **more)


def deep(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return value


def flow(*steps, **more):
    return compile_workflow(WorkflowSpec(name="flow", steps=steps, **more))


REFUSED = {
    "no step": ([], "0 steps"),
    "two of one name": ([job("a"), job("a")], "Step a is defined twice"),
    "a bad name": ([job("a b")], "is not a valid id of a step"),
    "unknown step": ([job("a", "b")], "depends on 'b', which does not exist"),
    "itself": ([job("a", "a")], "itself"),
    "a circle": ([job("a", "c"), job("b", "a"), job("c", "b")], "in a cycle"),
    "a circle through a parallel": (
        [
            StepSpec(id="p", type="parallel", parallel=ParallelSpec(steps=("m",))),
            job("m", "after"),
            job("after", "p"),
        ],
        "in a cycle",
    ),
    "a circle through a handler": ([job("a", on_error="h"), job("b", "a"), job("h", "b")], "in a cycle"),
    "a member that waits for its parallel": (
        [StepSpec(id="p", type="parallel", parallel=ParallelSpec(steps=("m",))), job("m", "p")],
        "Step m depends on a step that ends after it",
    ),
    "a member that waits for what comes after a parallel around its own": (
        [
            StepSpec(id="p", type="parallel", parallel=ParallelSpec(steps=("q",))),
            StepSpec(id="q", type="parallel", parallel=ParallelSpec(steps=("m",))),
            job("m", "after"),
            job("after", "p"),
        ],
        "m, after depend on each other in a cycle",
    ),
    "a handler that waits for what it handles": (
        [job("a", on_error="h"), job("h", "a")],
        "Step h depends on a step that ends after it",
    ),
    "neither task nor argv": ([StepSpec(id="a")], "either a task or an argv"),
    "one key for all runs": (
        [job("a", compensate=Compensation(topic="undo", task="undo", idempotency_key="mine"))],
        "all runs would share",
    ),
    "a field of another type": ([job("a", delay_sec=3)], "which does not use delay_sec"),
    "a delay of nothing": ([StepSpec(id="a", type="delay")], "either delay_sec or delay_until"),
    "a delay that is negative": ([StepSpec(id="a", type="delay", delay_sec=-1)], "seconds from 0"),
    "a moment without a zone": ([StepSpec(id="a", type="delay", delay_until="2026-01-01T00:00")], "a time such as"),
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
    "parallels in each other": (
        [
            StepSpec(id="p", type="parallel", parallel=ParallelSpec(steps=("q",))),
            StepSpec(id="q", type="parallel", parallel=ParallelSpec(steps=("p",))),
            job("after", "p"),
        ],
        "in a cycle",
    ),
    "handlers of each other": ([job("a", on_error="b"), job("b", on_error="a")], "in a cycle"),
    "parallels in parallels without an end": (
        [
            *(StepSpec(id=f"p{n}", type="parallel", parallel=ParallelSpec(steps=(f"p{n + 1}",))) for n in range(900)),
            job("p900"),
            job("after", "p0"),
        ],
        "32 levels deep",
    ),
    "steps without an end": ([job(f"s{n}") for n in range(1001)], "1001 steps"),
    "a name with a colon": ([job("a:b")], "is not a valid id of a step"),
    "a name of other letters": ([job("flüge")], "is not a valid id of a step"),
    "a name of digits of elsewhere": ([job("a\u0661")], "is not a valid id of a step"),
    "a name without an end": ([job("a" * 65)], "is not a valid id of a step"),
    "a delay that is no number": ([StepSpec(id="a", type="delay", delay_sec=float("nan"))], "seconds from 0"),
    "a delay without an end": ([StepSpec(id="a", type="delay", delay_sec=float("inf"))], "seconds from 0"),
    "a delay of a thousand years": ([StepSpec(id="a", type="delay", delay_sec=3.2e10)], "ten years"),
    "a moment that is none": ([StepSpec(id="a", type="delay", delay_until="tomorrow")], "a time such as"),
    "a deadline that is no number": ([job("a", deadline_s=float("nan"))], "is out of range"),
    "a timeout without an end": ([job("a", timeout_s=float("inf"))], "is out of range"),
    "a million items": ([job("a", for_each=[0] * 10**6)], "1000000 items"),
    "a value nested without an end": ([job("a", input={"x": deep(40)})], "32 levels deep"),
    "a value beyond any stack": ([job("a", args=(deep(50_000),))], "32 levels deep"),
    "a value that cannot be kept": ([job("a", input={"x": object()})], "cannot be stored"),
    "a definition without an end": ([job("a", input={"x": "y" * 1_100_000})], "at most 1048576"),
    "expressions without an end": ([job("a", input={"x": ["${input.n}"] * 201})], "201 expressions"),
    "an expression that looks at all steps": ([job("a", when="size(steps) > 0")], "reads all steps"),
    "an expression that calls nobody": ([job("a", when="'x'.shout() == 'X'")], "calls 'shout'"),
    "a pattern in a loop": ([job("a", when="input.l.all(x, x.matches('(a*)*'))")], "matches in a loop"),
    "a loop behind a comment": ([job("a", when="[1].// \nall(x, [1].all(y, true))")], "contains a comment"),
    "a loop behind a raw text": ([job("a", when=r"r'\' == '' || [1].all(x, [1].all(y, ' ' != ''))")], "loop in a loop"),
    "a loop behind a long text": ([job("a", when="'''it's''' != [1].map(x, [1].map(y, '')).size()")], "loop in a loop"),
    "a loop by another name": ([job("a", when="[1].existsOne(x, [1].existsOne(y, true))")], "loop in a loop"),
    "too many items": ([job("a", for_each=list(range(10_001)))], "10001 items"),
    "a loop without a bound": ([job("a", loop=LoopSpec(most=10**9))], "allows 1000000000 rounds"),
    "a loop over items": ([job("a", loop=LoopSpec(), for_each=[1])], "both loop and for_each"),
    "an expression that cannot be read": ([job("a", when="1 +")], "is not valid"),
    "an expression without an end": ([job("a", input={"x": "${input.n"})], "is not closed"),
    "an expression that loops in a loop": ([job("a", when="[1].all(x, [2].all(y, x == y))")], "has a loop in a loop"),
    "an unknown name": ([job("a", when="nobody == 1")], "reads 'nobody'"),
    "an expression of an unknown step": ([job("a", input={"x": "${steps.b.output}"})], "reads step 'b'"),
    "a step that need not have ended": ([job("a"), job("b", input={"x": "${steps.a.output}"})], "may not have ended"),
    "a bad task": ([job("a", cores=-1)], "Step a: "),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_could_never_run_is_refused(what):
    steps, sentence = REFUSED[what]
    with pytest.raises(InvalidInput) as refused:
        flow(*steps)
    assert sentence in refused.value.sentence


@pytest.mark.parametrize("text", ["${input.n}", "to ${ steps.a.output }", "${item.n}", "${round.index}", "${run.id}"])
def test_what_is_the_same_in_every_run_holds_no_expression(text):
    undo = Compensation(topic="undo", task="undo", env={"X": text})
    command = StepSpec(id="b", argv=("echo", text))
    for wrong in (command, job("b", env={"X": text}), job("b", labels={"x": text})):
        with pytest.raises(InvalidInput, match="of step b cannot contain expressions"):
            flow(wrong)
    with pytest.raises(InvalidInput, match="env of the compensation of step b cannot contain"):
        flow(job("b", compensate=undo))


def test_variables_of_a_shell_are_no_expressions():
    argv = ("sh", "-c", "for x in ${HOME} ${input} ${item} ${steps[0]} $${input.n}; do true; done")
    assert flow(StepSpec(id="a", argv=argv)).steps[0].spec.argv == argv


def test_an_input_that_the_workflow_does_not_have_is_refused():
    with pytest.raises(InvalidInput, match=r"reads input\.m"):
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
    assert decode_workflow(encode_workflow(spec)) == spec
    assert encode_workflow(decode_workflow(encode_workflow(spec))) == encode_workflow(spec)


def test_a_text_that_is_one_expression_keeps_its_type():
    scope = {"input": {"n": 2, "list": [1, {"k": "v"}]}}
    made = compile_template({"n": "${input.n}", "more": ["${input.n + 1}", "n=${input.n} $${x}"], "plain": 1}, "it")
    assert made(scope) == {"n": 2, "more": [3, "n=2 ${x}"], "plain": 1}
    assert compile_template("${input.list[1].k}", "it")(scope) == "v"
    assert compile_template("${'}' + input.list[1].k}", "it")(scope) == "}v"
    assert compile_template({"plain": ["x"]}, "it") is None


def test_an_expression_without_a_value_says_so():
    for text in ("input.missing", "input.n + 'x'", "input.list[9]"):
        with pytest.raises(ExpressionError, match="no value"):
            compile_expression(text, "it")({"input": {"n": 1, "list": []}})


LONG = {
    "a list that is too long": ("input.l.all(x, x >= 0)", {"l": list(range(10_001))}, "a list of 10001"),
    "copies of copies": ("input.l.map(x, x * 2).size()", {"l": list(range(10_000))}, "too long"),
    "copies of objects": ("input.l.filter(x, x.a > 0)", {"l": [{"a": 1, "b": [1, 2], "c": "d"}] * 2000}, "too long"),
    "lists of lists": ("input.l.map(x, input.l)", {"l": list(range(1000))}, "too long"),
    "a search for each": ("input.l.all(x, x in input.l)", {"l": list(range(5000))}, "too long"),
    "a text that doubles": ("['a']" + ".map(x, x + x + x + x + x + x + x + x + x)" * 8, {}, "too long"),
    "a text that is added up": ("+".join(["input.s"] * 400), {"s": "x" * 250_000}, "too long"),
}


@pytest.mark.parametrize("what", LONG)
def test_an_expression_that_would_take_too_long_for_what_it_is_given_is_not_begun(what):
    text, given, sentence = LONG[what]
    made = compile_expression(text, "it")
    began = time.process_time()
    with pytest.raises(ExpressionError, match=sentence):
        made({"input": given})
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("input.l.all(x, x >= 0)", {"l": list(range(10_000))}),
        ("input.l.map(x, x * 2).size() == 1000", {"l": list(range(1000))}),
        ("input.l.filter(x, x.a > 0).size() == 400", {"l": [{"a": 1, "b": [1, 2], "c": "d"}] * 400}),
        ("+".join(["input.s"] * 30) + " != ''", {"s": "x" * 250_000}),
    ],
)
def test_an_expression_over_much_that_may_be_asked_ends_soon(text, given):
    made = compile_expression(text, "it")
    began = time.process_time()
    assert made({"input": given}) is True
    assert time.process_time() - began < 2


def test_the_expressions_of_one_advance_have_a_bound_together():
    scope = {"input": {"l": list(range(1000))}, METER_KEY: CostMeter()}
    made = compile_expression("input.l.map(x, x + 1).size()", "it")
    with pytest.raises(ExpressionError, match="together"):
        sum(made(scope) for _ in range(100))


def test_an_expression_is_given_what_it_names_and_nothing_else():
    scope = {"input": {"a": {"b": [1, 2], "c": 3, "size": 9}, "x": 1}, "steps": {"a-b": {"output": {"n": 4}}}}
    values = {
        "input.a.c + input.a.b[1]": 5,
        "input.a.size() + input.a.b.size()": 5,
        "input.a.size + 1": 10,
        "'x' in input && has(input.a.c) && !has(input.a.z)": True,
        "steps['a-b'].output.n + input['a']['c']": 7,
        "'input.gone' + string(input.x)": "input.gone1",
        "input.a.b.map(item, item + input.x)": [2, 3],
    }
    assert {text: compile_expression(text, "it")(scope) for text in values} == values


def test_an_expression_that_cannot_be_read_or_is_too_large_is_refused():
    with pytest.raises(InvalidInput, match="9 loops"):
        compile_expression(" && ".join(["[1].all(x, true)"] * 9), "it")
    for text in (
        "(" * 4000,
        "[" * 2000 + "]" * 2000,
        "size(" * 700 + "1" + ")" * 700,
        "x" * 4097,
        "true?1:" * 500 + "1",
    ):
        with pytest.raises(InvalidInput, match=r"is not valid|characters"):
            compile_expression(text, "it")


def test_a_text_does_not_grow_beyond_what_can_be_passed_on():
    made = compile_template("${input.s} and ${input.s}", "it")
    with pytest.raises(ExpressionError, match="262144 characters"):
        made({"input": {"s": "x" * 200_000}})
    with pytest.raises(ExpressionError, match="cannot be converted to text"):
        compile_template("it is ${input.it}", "it")({"input": {"it": object()}})


@pytest.mark.parametrize(
    ("given", "due_ms"),
    [
        *(("0001-01-01T00:00:00+14:00", -62135647200000), ("2026-01-01T00:00:00.5Z", 1767225600500), ("later", None)),
        *(("2026-01-01T00:00:00", None), ("9999-12-31T23:59:59Z", None), (5, None)),
    ],
)
def test_a_moment_far_in_the_past_is_over_and_one_far_ahead_is_refused(given, due_ms):
    spec = StepSpec(id="a", type="delay", delay_until="${input.at}")
    if due_ms is not None:
        assert compiler.due_ms(spec, given, 1_767_225_600_000) == due_ms
        return
    with pytest.raises(ExpressionError, match="Step a waits until"):
        compiler.due_ms(spec, given, 1_767_225_600_000)
