"""Workflows in Python: equal to their YAML form, and refused with a message where they are declared."""

from dataclasses import dataclass
from datetime import UTC, datetime

import pytest

from rota import Retries, Rota, Steps
from rota.model.errors import InvalidInput
from rota.model.workflows.compiler import compile_workflow
from rota.model.workflows.spec import encode_workflow
from rota.workflow.yaml_loader import parse


@dataclass
class Ticket:
    number: str
    price: int


@pytest.fixture
def app():
    return Rota(show="travel")


@pytest.fixture
def tasks(app):
    @app.task(topic="air", retries=Retries(most=2, first_s=3.0), timeout="10min", cores=2)
    async def book(city: str, nights: int = 1) -> Ticket: ...

    @app.task
    def cancel(ticket: Ticket, why: str = "") -> None: ...

    @app.task(retries=3)
    def square(value: int) -> int: ...

    return {"book": book, "cancel": cancel, "square": square}


TRIP = """\
name: trip
show: travel
description: Books a trip.
inputs: {city: {required: true}, nights: 2}
rollback_on: [failed, timeout]
timeout_s: 3600
steps:
  - id: flight
    task: book
    topic: air
    cores: 2
    timeout_s: 600
    retry: {most: 2, first_s: 3}
    args: ["${input.city}"]
    compensate: {topic: cancel, task: cancel, context: {ticket: "${steps.flight.output}"}}
  - id: hotel
    task: book
    topic: inns
    cores: 2
    timeout_s: 600
    priority: BATCH
    labels: {team: a}
    retry: {most: 2, first_s: 3}
    args: ["to ${input.city}"]
    input: {nights: "${input.nights}"}
    depends_on: [flight]
    when: (input.nights > 1) && ((steps.flight.output.price < 100) || (input.city == "Oslo"))
    compensate:
      topic: cancel
      task: cancel
      context: {ticket: "${steps.hotel.output}", why: "no ${steps.flight.output.number}"}
output: {ticket: "${steps.flight.output.number}", all: ["${steps.hotel.output}"]}
"""


def test_python_workflow_encodes_to_the_same_bytes_as_yaml(app, tasks):
    book, cancel = tasks["book"], tasks["cancel"]

    @app.workflow(rollback_on=["timeout", "failed"], timeout="1h")
    def trip(steps: Steps, city: str, nights: int = 2) -> dict[str, object]:
        """Books a trip."""
        flight = steps.job("flight", book.call(city), compensate=cancel.call)
        hotel = steps.job(
            "hotel",
            book.options(topic="inns", priority="BATCH", labels={"team": "a"}).call(f"to {city}", nights=nights),
            when=(nights > 1) & ((flight.output.price < 100) | (city == "Oslo")),
            compensate=lambda room: cancel.call(room, why=f"no {flight.output.number}"),
        )
        return {"ticket": flight.output.number, "all": [hotel.output]}

    assert encode_workflow(trip.spec) == encode_workflow(parse(TRIP))
    assert app.flows == {"trip": trip}


EVERY_STEP_TYPE = """\
name: every
show: travel
inputs: {sizes: {required: true}, kind: "a"}
steps:
  - {id: night, type: delay, delay_sec: 28800}
  - {id: dawn, type: delay, delay_until: "2026-01-31T12:00:00Z", depends_on: [night]}
  - {id: pause, type: delay, delay_sec: "${input.sizes[0]}"}
  - {id: large, type: condition, condition: size(input.sizes) > 3}
  - {id: which, type: switch, switch: {on: input.kind, cases: {a: [one, two], "b": [one, two]}, default: [three]}}
  - {id: one, type: notify, notify: "one: ${input.kind}"}
  - {id: two, type: notify, notify: two, depends_on: [one]}
  - {id: three, type: parallel, deadline_s: 60, parallel: {steps: [four, five], need: any}}
  - {id: four, task: square, retry: 3, args: [4]}
  - {id: five, task: square, retry: 3, args: [5], on_error: told}
  - {id: told, type: notify, notify: "why: ${steps.five.error}"}
  - {id: each, task: square, retry: 3, args: ["${item}"], for_each: "${input.sizes}", max_parallel: 2}
  - {id: again, task: square, retry: 3, args: ["${round.index}"], depends_on: [each],
     loop: {until: "round.output > (steps.each.output[0] + 1)", most: 5}}
  - {id: more, task: square, retry: 3, args: [1], loop: {while: round.index < 2}}
  - {id: inner, type: workflow, workflow: small, input: {n: "${steps.again.output}"}, depends_on: [again]}
  - {id: pack, argv: [tar, cf, a.tar, a], input: {run: "${run.id}"}, cores: 0.5, depends_on: [inner, large]}
  - {id: ok, type: approval, approval: {text: "Ship ${steps.inner.output}?", quorum: 2, expires_s: 86400},
     input: {n: "${steps.again.output}"}, depends_on: [again, inner]}
  - {id: by, type: notify, notify: "by ${steps.ok.output.by[0]}", depends_on: [ok]}
output: "${steps.inner.output}"
"""


def test_every_step_type_can_be_declared_in_python(app, tasks):
    square = tasks["square"]

    @app.workflow
    def small(steps: Steps, n: int) -> int:
        return steps.job("a", square.call(n)).output

    @app.workflow
    def every(steps: Steps, sizes: list[int], kind: str = "a") -> int:
        night = steps.delay("night", "8h")
        steps.delay("dawn", until=datetime(2026, 1, 31, 12, tzinfo=UTC), after=night)
        steps.delay("pause", sizes[0])
        large = steps.condition("large", "size(input.sizes) > 3")
        which = steps.switch("which", kind)
        with which.case("a", "b"):
            one = steps.notify("one", f"one: {kind}")
            steps.notify("two", "two", after=[one])
        with which.default(), steps.parallel("three", need="any", deadline="1min"):
            steps.job("four", square.call(4))
            five = steps.job("five", square.call(5))
            with five.on_error():
                steps.notify("told", f"why: {five.error}")
        each = steps.each("each", square.call, sizes, max_parallel=2)
        again = steps.loop(
            "again", square.call(steps.round.index), until=lambda found: found > each.output[0] + 1, most=5
        )
        steps.loop("more", square.call(1), while_=steps.round.index < 2)
        inner = steps.workflow("inner", small.call(again.output))
        steps.command(
            "pack",
            ["tar", "cf", "a.tar", "a"],
            reads={"run": steps.run_id},
            options={"cores": 0.5},
            after=[inner, large],
        )
        ok = steps.approval("ok", f"Ship {inner.output}?", shows={"n": again.output}, quorum=2, expires="1d")
        steps.notify("by", f"by {ok.output.by[0]}")
        return inner.output

    assert encode_workflow(every.spec) == encode_workflow(parse(EVERY_STEP_TYPE))


def test_value_unknown_at_declaration_becomes_an_expression(app, tasks):
    square = tasks["square"]
    expressions = []

    @app.workflow
    def flow(steps: Steps, n: int, given: dict[str, list[int]]) -> None:
        step = steps.job("first-step", square.call(n))
        expressions.extend(
            map(
                str,
                [
                    n,
                    f"{n!r}",
                    given["a b"],
                    given["in"],
                    given["a"][n],
                    2 * (n + 1) - n,
                    n != 3,
                    step.output,
                    step.state,
                ],
            )
        )
        steps.job("next", square.call(step.output))

    assert expressions == [
        "${input.n}",
        "${input.n}",
        '${input.given["a b"]}',
        '${input.given["in"]}',
        "${input.given.a[input.n]}",
        "${(2 * (input.n + 1)) - input.n}",
        "${input.n != 3}",
        '${steps["first-step"].output}',
        '${steps["first-step"].state}',
    ]
    assert flow.spec.steps[1].depends_on == ("first-step",)


def branches_on_value(steps, n, tasks):
    if n > 2:
        steps.notify("a", "a")


def iterates_over_value(steps, n, tasks):
    for each in n:
        steps.notify("a", str(each))


def searches_value(steps, n, tasks):
    steps.notify("a", "a", when=3 in n)


def calls_value(steps, n, tasks):
    steps.notify("a", n.upper())


def takes_length(steps, n, tasks):
    steps.notify("a", str(len(n)))


def formats_with_width(steps, n, tasks):
    steps.notify("a", f"{n:>10}")


def constant_condition(steps, n, tasks):
    steps.notify("a", "a", when=bool(tasks))


def negative_index(steps, n, tasks):
    steps.notify("a", f"{n[-1]}")


def duplicate_step(steps, n, tasks):
    steps.notify("a", "a")
    steps.notify("a", "b")


def unknown_option(steps, n, tasks):
    steps.job("a", tasks["square"].options(run_at="1h").call(n))


def compensation_with_cores(steps, n, tasks):
    steps.job("a", tasks["square"].call(n), compensate=tasks["cancel"].options(cores=2).call)


def two_handlers(steps, n, tasks):
    with steps.job("a", tasks["square"].call(n)).on_error():
        steps.notify("b", "b")
        steps.notify("c", "c")


def cycle(steps, n, tasks):
    with steps.parallel("a") as both:
        steps.job("b", tasks["square"].call(n), after=both)


def empty_parallel(steps, n, tasks):
    steps.parallel("a")


def duplicate_case(steps, n, tasks):
    which = steps.switch("a", n)
    with which.case("x"):
        steps.notify("b", "b")
    with which.case("x"):
        steps.notify("c", "c")


def invalid_expression(steps, n, tasks):
    steps.notify("a", "a", when="input.n >")


def unknown_step(steps, n, tasks):
    steps.notify("a", "${steps.z.output}")


def invalid_delay(steps, n, tasks):
    steps.delay("a", "soon")


def time_without_zone(steps, n, tasks):
    steps.delay("a", until=datetime(2026, 1, 1))  # noqa: DTZ001


def task_instead_of_call(steps, n, tasks):
    steps.job("a", tasks["square"])


def compensation_without_call(steps, n, tasks):
    steps.job("a", tasks["square"].call(1), compensate=lambda _done: None)


def unencodable_input(steps, n, tasks):
    steps.command("a", ["true"], reads={"what": object()})


def divides_value(steps, n, tasks):
    steps.job("a", tasks["square"].call(n / 2))


def inverts_value(steps, n, tasks):
    steps.delay("a", 1, when=~n)


def converts_to_int(steps, n, tasks):
    steps.job("a", tasks["square"].call(int(n)))


def assigns_item(steps, n, tasks):
    n["x"] = 1


def after_a_step_name(steps, n, tasks):
    steps.delay("a", 1)
    steps.delay("b", 1, after="a")


def compensation_by_task(steps, n, tasks):
    steps.job("a", tasks["square"].call(1), compensate=tasks["square"])


def expression_in_argv(steps, n, tasks):
    steps.command("a", ["echo", f"{n}"])


def unencodable_operand(steps, n, tasks):
    steps.notify("a", "a", when=n == object())


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (branches_on_value, "The value of input.n > 2 is not known yet, so it cannot be tested here: use when="),
        (iterates_over_value, "input.n is not known yet and cannot be iterated"),
        (searches_value, "input.n is not known yet and cannot be searched"),
        (calls_value, "input.n.upper is not known yet and cannot be called: do it in a task"),
        (takes_length, "use the text 'size(input.n)' for its length"),
        (formats_with_width, "cannot be formatted as '>10'"),
        (constant_condition, "The when of step a is always True"),
        (negative_index, "a position from 0"),
        (duplicate_step, "Step a is declared twice"),
        (unknown_option, "Step a: A step has no option 'run_at': use one of cores"),
        (compensation_with_cores, "Step a: A compensation has no option 'cores'"),
        (two_handlers, "Step a has 2 steps in on_error()"),
        (cycle, "Step b depends on a step that ends after it"),
        (empty_parallel, "Step a has no steps to run in parallel"),
        (duplicate_case, "Step a has two cases 'x'"),
        (invalid_expression, "The expression 'input.n >' of step a is not valid"),
        (unknown_step, "reads step 'z', which does not exist"),
        (invalid_delay, "Step a: "),
        (task_instead_of_call, "Step a got a FunctionTask: pass a call of a task, as in task.call(1)"),
        (compensation_without_call, "Step a got a NoneType"),
        (unencodable_input, "The input of step a cannot be encoded: the type object is not supported"),
        (unencodable_operand, "A part of an expression cannot be encoded"),
        (time_without_zone, "Step a waits until 2026-01-01 00:00:00, which has no time zone"),
        (divides_value, "input.n is not known yet and does not support this operation: do it in a task"),
        (inverts_value, "input.n is not known yet and does not support this operation"),
        (converts_to_int, "input.n is not known yet and does not support this operation"),
        (assigns_item, "input.n is not known yet and does not support this operation"),
        (after_a_step_name, "Step b has an `after` that is not a step: pass what steps.job() and the like return"),
        (compensation_by_task, "Step a: pass the compensation as a call, square.call"),
        (expression_in_argv, "The argv of step a cannot contain expressions: put varying values into its input"),
    ],
)
def test_invalid_workflow_is_refused_with_a_message_at_its_declaration(app, tasks, body, sentence):
    with pytest.raises(InvalidInput) as refused:

        @app.workflow
        def flow(steps: Steps, n: str) -> None:
            body(steps, n, tasks)

    assert sentence in refused.value.sentence, refused.value.sentence
    assert app.flows == {}


def test_workflow_cannot_return_a_step_or_add_one_after_its_declaration(app, tasks):
    kept = []

    @app.workflow
    def flow(steps: Steps) -> None:
        kept.append(steps)
        steps.delay("a", 1)

    with pytest.raises(InvalidInput, match="Step b is too late"):
        kept[0].delay("b", 1)
    with pytest.raises(InvalidInput, match="Workflow other returns a step: return its output"):
        app.workflow(name="other")(lambda steps: steps.delay("a", 1))


def test_workflow_is_a_sync_function_with_named_inputs(app, tasks):
    with pytest.raises(InvalidInput, match=r"def flow\(steps\)"):

        @app.workflow
        async def flow(steps: Steps) -> None: ...

    with pytest.raises(InvalidInput, match="takes a variable number of more"):

        @app.workflow
        def loose(steps: Steps, *more: int) -> None: ...

    with pytest.raises(InvalidInput, match="always returns 5"):

        @app.workflow
        def five(steps: Steps) -> int:
            return 5

    @app.workflow
    def once(steps: Steps, a: int, /, b: int, *, c: int = 3) -> None:
        steps.notify("a", f"{a}{b}{c}")

    assert once.dry_run(1, b=2).input == {"a": 1, "b": 2, "c": 3}
    with pytest.raises(InvalidInput, match="cannot be started with these inputs: missing a required argument: 'b'"):
        once.call(1)
    with pytest.raises(
        InvalidInput, match="The input of workflow once cannot be encoded: the type object is not supported"
    ):
        once.call(1, b=object())

    with pytest.raises(InvalidInput, match="The default of c of workflow flow cannot be encoded"):

        @app.workflow
        def flow(steps: Steps, c: object = app) -> None: ...

    with pytest.raises(InvalidInput, match="Workflow 'once' is declared twice"):
        app.workflow(name="once")(lambda steps: steps.notify("a", "a") and None)


def test_workflow_may_run_only_workflows_of_its_own_show(app, tasks):
    @app.workflow(show="elsewhere")
    def far(steps: Steps) -> None:
        steps.notify("a", "a")

    with pytest.raises(InvalidInput, match="Step go runs the workflow far of show elsewhere: set the show of both"):

        @app.workflow
        def near(steps: Steps) -> None:
            steps.workflow("go", far.call())


def test_dry_run_lists_steps_with_their_dependencies(app, tasks):
    @app.workflow
    def flow(steps: Steps, n: int = 1) -> None:
        first = steps.job("first", tasks["square"].call(n))
        with steps.parallel("both", after=first):
            steps.job("left", tasks["square"].call(first.output))
            steps.job("right", tasks["square"].call(n))

    plan = flow.dry_run(n=4)
    assert (plan.workflow, plan.input) == ("flow", {"n": 4})
    assert [(step.id, step.type, step.after) for step in plan.steps] == [
        ("first", "job", []),
        ("both", "parallel", ["first"]),
        ("left", "job", ["first", "both"]),
        ("right", "job", ["both"]),
    ]
    assert compile_workflow(flow.spec).spec is flow.spec
