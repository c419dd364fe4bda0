"""Compiling workflow definitions and expressions: what is valid, and what is refused."""

import time

import pytest

from rota.model.cel_guard import CostMeter
from rota.model.errors import InvalidInput
from rota.model.jobs.submission import Compensation
from rota.model.workflows import compiler
from rota.model.workflows.cel import METER_KEY
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


def job(name, *dependencies, **more):
    return StepSpec(id=name, task="work", depends_on=dependencies, **more)


def nested(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return value


def flow(*steps, **more):
    return compile_workflow(WorkflowSpec(name="flow", steps=steps, **more))


REFUSED = {
    "no step": ([], "0 steps"),
    "duplicate step id": ([job("a"), job("a")], "Step a is defined twice"),
    "a malformed id": ([job("a b")], "is not a valid id of a step"),
    "unknown step": ([job("a", "b")], "depends on 'b', which does not exist"),
    "a step that depends on itself": ([job("a", "a")], "depends on itself"),
    "a cycle": ([job("a", "c"), job("b", "a"), job("c", "b")], "in a cycle"),
    "a cycle through a parallel": (
        [
            StepSpec(id="p", type="parallel", parallel=ParallelSpec(steps=("m",))),
            job("m", "after"),
            job("after", "p"),
        ],
        "in a cycle",
    ),
    "a cycle through a handler": ([job("a", on_error="h"), job("b", "a"), job("h", "b")], "in a cycle"),
    "a member that waits for its parallel": (
        [StepSpec(id="p", type="parallel", parallel=ParallelSpec(steps=("m",))), job("m", "p")],
        "Step m depends on a step that ends after it",
    ),
    "a member that waits for a step after an enclosing parallel": (
        [
            StepSpec(id="p", type="parallel", parallel=ParallelSpec(steps=("q",))),
            StepSpec(id="q", type="parallel", parallel=ParallelSpec(steps=("m",))),
            job("m", "after"),
            job("after", "p"),
        ],
        "m, after depend on each other in a cycle",
    ),
    "a handler that waits for its step": (
        [job("a", on_error="h"), job("h", "a")],
        "Step h depends on a step that ends after it",
    ),
    "neither task nor argv": ([StepSpec(id="a")], "either a task or an argv"),
    "an idempotency key shared by all runs": (
        [job("a", compensate=Compensation(topic="undo", task="undo", idempotency_key="mine"))],
        "all runs would share",
    ),
    "a field of another type": ([job("a", delay_sec=3)], "which does not use delay_sec"),
    "a delay without a duration": ([StepSpec(id="a", type="delay")], "either delay_sec or delay_until"),
    "a negative delay": ([StepSpec(id="a", type="delay", delay_sec=-1)], "seconds from 0"),
    "a time without a zone": ([StepSpec(id="a", type="delay", delay_until="2026-01-01T00:00")], "a time such as"),
    "a quorum above the number of members": (
        [StepSpec(id="p", type="parallel", parallel=ParallelSpec(steps=("a",), need=2)), job("a")],
        "needs 2 of 1",
    ),
    "a step with two owners": (
        [
            StepSpec(id="p", type="parallel", parallel=ParallelSpec(steps=("a",))),
            StepSpec(id="s", type="switch", switch=SwitchSpec(on="1", cases={"1": ("a",)})),
            job("a"),
        ],
        "belongs to both",
    ),
    "parallels that contain each other": (
        [
            StepSpec(id="p", type="parallel", parallel=ParallelSpec(steps=("q",))),
            StepSpec(id="q", type="parallel", parallel=ParallelSpec(steps=("p",))),
            job("after", "p"),
        ],
        "in a cycle",
    ),
    "handlers of each other": ([job("a", on_error="b"), job("b", on_error="a")], "in a cycle"),
    "parallels nested too deep": (
        [
            *(StepSpec(id=f"p{n}", type="parallel", parallel=ParallelSpec(steps=(f"p{n + 1}",))) for n in range(900)),
            job("p900"),
            job("after", "p0"),
        ],
        "32 levels deep",
    ),
    "too many steps": ([job(f"s{n}") for n in range(1001)], "1001 steps"),
    "an id with a colon": ([job("a:b")], "is not a valid id of a step"),
    "an id with non-ASCII letters": ([job("flüge")], "is not a valid id of a step"),
    "an id with non-ASCII digits": ([job("a\u0661")], "is not a valid id of a step"),
    "an id that is too long": ([job("a" * 65)], "is not a valid id of a step"),
    "a NaN delay": ([StepSpec(id="a", type="delay", delay_sec=float("nan"))], "seconds from 0"),
    "an infinite delay": ([StepSpec(id="a", type="delay", delay_sec=float("inf"))], "seconds from 0"),
    "a delay of a thousand years": ([StepSpec(id="a", type="delay", delay_sec=3.2e10)], "ten years"),
    "a malformed time": ([StepSpec(id="a", type="delay", delay_until="tomorrow")], "a time such as"),
    "a NaN deadline": ([job("a", deadline_s=float("nan"))], "is out of range"),
    "an infinite timeout": ([job("a", timeout_s=float("inf"))], "is out of range"),
    "a million items": ([job("a", for_each=[0] * 10**6)], "1000000 items"),
    "a value nested too deep": ([job("a", input={"x": nested(40)})], "32 levels deep"),
    "a value deeper than the stack": ([job("a", args=(nested(50_000),))], "32 levels deep"),
    "a value that cannot be stored": ([job("a", input={"x": object()})], "cannot be stored"),
    "a definition that is too large": ([job("a", input={"x": "y" * 1_100_000})], "at most 1048576"),
    "too many expressions": ([job("a", input={"x": ["${input.n}"] * 201})], "201 expressions"),
    "an expression that reads all steps": ([job("a", when="size(steps) > 0")], "reads all steps"),
    "an expression that calls an unknown function": ([job("a", when="'x'.shout() == 'X'")], "calls 'shout'"),
    "a pattern in a loop": ([job("a", when="input.l.all(x, x.matches('(a*)*'))")], "matches in a loop"),
    "a loop hidden by a comment": ([job("a", when="[1].// \nall(x, [1].all(y, true))")], "contains a comment"),
    "a loop hidden by a raw string": (
        [job("a", when=r"r'\' == '' || [1].all(x, [1].all(y, ' ' != ''))")],
        "loop in a loop",
    ),
    "a loop hidden by a triple-quoted string": (
        [job("a", when="'''it's''' != [1].map(x, [1].map(y, '')).size()")],
        "loop in a loop",
    ),
    "a loop under another name": ([job("a", when="[1].existsOne(x, [1].existsOne(y, true))")], "loop in a loop"),
    "too many items": ([job("a", for_each=list(range(10_001)))], "10001 items"),
    "a loop without a bound": ([job("a", loop=LoopSpec(most=10**9))], "allows 1000000000 rounds"),
    "a loop over items": ([job("a", loop=LoopSpec(), for_each=[1])], "both loop and for_each"),
    "a malformed expression": ([job("a", when="1 +")], "is not valid"),
    "an unclosed expression": ([job("a", input={"x": "${input.n"})], "is not closed"),
    "a nested loop": ([job("a", when="[1].all(x, [2].all(y, x == y))")], "has a loop in a loop"),
    "an unknown name": ([job("a", when="nobody == 1")], "reads 'nobody'"),
    "an expression that reads an unknown step": ([job("a", input={"x": "${steps.b.output}"})], "reads step 'b'"),
    "an expression that reads a step that may not have ended": (
        [job("a"), job("b", input={"x": "${steps.a.output}"})],
        "may not have ended",
    ),
    "an invalid job": ([job("a", cores=-1)], "Step a: "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_workflow_that_could_never_run_is_refused(case):
    steps, sentence = REFUSED[case]
    with pytest.raises(InvalidInput) as refused:
        flow(*steps)
    assert sentence in refused.value.sentence


@pytest.mark.parametrize("text", ["${input.n}", "to ${ steps.a.output }", "${item.n}", "${round.index}", "${run.id}"])
def test_fields_fixed_for_all_runs_cannot_contain_expressions(text):
    undo = Compensation(topic="undo", task="undo", env={"X": text})
    command = StepSpec(id="b", argv=("echo", text))
    for wrong in (command, job("b", env={"X": text}), job("b", labels={"x": text})):
        with pytest.raises(InvalidInput, match="of step b cannot contain expressions"):
            flow(wrong)
    with pytest.raises(InvalidInput, match="env of the compensation of step b cannot contain"):
        flow(job("b", compensate=undo))


def test_shell_variables_are_not_expressions():
    argv = ("sh", "-c", "for x in ${HOME} ${input} ${item} ${steps[0]} $${input.n}; do true; done")
    assert flow(StepSpec(id="a", argv=argv)).steps[0].spec.argv == argv


def test_expression_that_reads_an_undeclared_input_is_refused():
    with pytest.raises(InvalidInput, match=r"reads input\.m"):
        flow(job("a", input={"x": "${input.m}"}), inputs={"n": 1})


def test_workflow_definition_survives_json():
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


def test_template_that_is_one_expression_keeps_its_type():
    scope = {"input": {"n": 2, "list": [1, {"k": "v"}]}}
    template = compile_template({"n": "${input.n}", "more": ["${input.n + 1}", "n=${input.n} $${x}"], "plain": 1}, "it")
    assert template(scope) == {"n": 2, "more": [3, "n=2 ${x}"], "plain": 1}
    assert compile_template("${input.list[1].k}", "it")(scope) == "v"
    assert compile_template("${'}' + input.list[1].k}", "it")(scope) == "}v"
    assert compile_template({"plain": ["x"]}, "it") is None


def test_expression_without_a_value_raises():
    for text in ("input.missing", "input.n + 'x'", "input.list[9]"):
        with pytest.raises(ExpressionError, match="no value"):
            compile_expression(text, "it")({"input": {"n": 1, "list": []}})


LONG = {
    "a list that is too long": ("input.l.all(x, x >= 0)", {"l": list(range(10_001))}, "a list of 10001"),
    "a mapped list": ("input.l.map(x, x * 2).size()", {"l": list(range(10_000))}, "too long"),
    "copies of objects": ("input.l.filter(x, x.a > 0)", {"l": [{"a": 1, "b": [1, 2], "c": "d"}] * 2000}, "too long"),
    "lists of lists": ("input.l.map(x, input.l)", {"l": list(range(1000))}, "too long"),
    "a search per item": ("input.l.all(x, x in input.l)", {"l": list(range(5000))}, "too long"),
    "a text that doubles": ("['a']" + ".map(x, x + x + x + x + x + x + x + x + x)" * 8, {}, "too long"),
    "a long concatenation": ("+".join(["input.s"] * 400), {"s": "x" * 250_000}, "too long"),
}


@pytest.mark.parametrize("case", LONG)
def test_expression_too_costly_for_its_input_is_refused_before_evaluation(case):
    text, given, sentence = LONG[case]
    expression = compile_expression(text, "it")
    began = time.process_time()
    with pytest.raises(ExpressionError, match=sentence):
        expression({"input": given})
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
def test_expression_within_its_cost_limit_ends_soon(text, given):
    expression = compile_expression(text, "it")
    began = time.process_time()
    assert expression({"input": given}) is True
    assert time.process_time() - began < 2


def test_expressions_of_one_advance_share_a_cost_limit():
    scope = {"input": {"l": list(range(1000))}, METER_KEY: CostMeter()}
    expression = compile_expression("input.l.map(x, x + 1).size()", "it")
    with pytest.raises(ExpressionError, match="together"):
        sum(expression(scope) for _ in range(100))


def test_expression_reads_exactly_the_values_it_names():
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


def test_malformed_or_oversized_expression_is_refused():
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


def test_template_result_is_bounded_and_must_be_text():
    template = compile_template("${input.s} and ${input.s}", "it")
    with pytest.raises(ExpressionError, match="262144 characters"):
        template({"input": {"s": "x" * 200_000}})
    with pytest.raises(ExpressionError, match="cannot be converted to text"):
        compile_template("it is ${input.it}", "it")({"input": {"it": object()}})


@pytest.mark.parametrize(
    ("given", "due_ms"),
    [
        *(("0001-01-01T00:00:00+14:00", -62135647200000), ("2026-01-01T00:00:00.5Z", 1767225600500), ("later", None)),
        *(("2026-01-01T00:00:00", None), ("9999-12-31T23:59:59Z", None), (5, None)),
    ],
)
def test_delay_until_a_past_time_is_due_and_an_invalid_or_too_distant_one_is_refused(given, due_ms):
    spec = StepSpec(id="a", type="delay", delay_until="${input.at}")
    if due_ms is not None:
        assert compiler.due_ms(spec, given, 1_767_225_600_000) == due_ms
        return
    with pytest.raises(ExpressionError, match="Step a waits until"):
        compiler.due_ms(spec, given, 1_767_225_600_000)
