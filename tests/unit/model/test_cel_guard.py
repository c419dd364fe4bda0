"""The guard of CEL: what it refuses at compile time, what before an evaluation, and with which words."""

import time

import pytest

from rota.model.cel_guard import (
    CONDITION_LIMITS,
    PHRASES,
    SENTENCES,
    WORKFLOW_LIMITS,
    CostMeter,
    ExpressionError,
    Violation,
    compile_guarded,
    estimate_cost,
)
from rota.model.errors import InvalidInput
from rota.model.workflows.cel import WORKFLOW_DIALECT
from rota.policy.expressions import CONDITION_DIALECT

DIALECTS = {"workflow": WORKFLOW_DIALECT, "condition": CONDITION_DIALECT}
IN_A_LOOP = (
    "The expression '[1].all(x, input.s.matches(x))' of step a has matches in a loop: move the work into a task."
)
TWO_LOOPS = "The expression '[1].all(x, [2].all(y, x == y))' of step a has a loop in a loop: move the work into a task."
REFUSED = {
    "workflow": {
        Violation.BLANK: (" ", "The expression of step a has 1 characters: use 1 to 4096."),
        Violation.SIZE: ("1" * 4097, "The expression of step a has 4097 characters: use 1 to 4096."),
        Violation.COMMENT: ("1 // one", "The expression '1 // one' of step a contains a comment: remove it."),
        Violation.BRACKETS: (
            "(" * 96 + "1" + ")" * 96,
            f"The expression '{'(' * 57}...' of step a is not valid: its brackets nest more than 95 deep.",
        ),
        Violation.LOOPS: (
            " && ".join(["[1].all(x, true)"] * 9),
            "The expression of step a has 9 loops: use at most 8.",
        ),
        Violation.LOOP_DEPTH: ("[1].all(x, [2].all(y, x == y))", TWO_LOOPS),
        Violation.MATCHES_COUNT: (
            " && ".join(["'a'.matches('b')"] * 9),
            "The expression of step a has 9 matches: use at most 8.",
        ),
        Violation.MATCHES_IN_LOOP: ("[1].all(x, input.s.matches(x))", IN_A_LOOP),
        Violation.INVALID: (
            "input.n )",
            (
                "The expression 'input.n )' of step a is not valid: Syntax error: extraneous input ')' expecting <EOF>"
                " at column 9."
            ),
        ),
        Violation.VARIABLE: (
            "nobody == 1",
            "The expression 'nobody == 1' of step a reads 'nobody': use one of input, item, round, run, steps.",
        ),
        Violation.FUNCTION: (
            "'x'.shout() == 'X'",
            "The expression \"'x'.shout() == 'X'\" of step a calls 'shout', which does not exist.",
        ),
    },
    "condition": {
        Violation.BLANK: (" ", "this is not valid CEL: it is blank"),
        Violation.SIZE: ("é" * 1025, "an expression can have at most 2048 bytes"),
        Violation.COMMENT: ("true // why", "an expression cannot have comments: write them as YAML comments"),
        Violation.BRACKETS: ("(" * 25 + "1" + ")" * 25, "the brackets of an expression can nest at most 24 deep"),
        Violation.MACRO: (
            "tasks.map(t, t + t) == []",
            "`map` is not supported: use all, exists, exists_one or filter",
        ),
        Violation.LOOP_DEPTH: (
            "tasks.all(a, tasks.all(b, tasks.all(c, true)))",
            "all, exists, exists_one and filter can nest at most 2 deep",
        ),
        Violation.PATTERN_NOT_LITERAL: (
            "topic.matches(show)",
            "matches takes one string literal, such as topic.matches('^job')",
        ),
        Violation.INVALID_LITERAL: (r"topic.matches('\q')", r"'\q' is not a valid string literal"),
        Violation.INVALID: (
            "frames )",
            "this is not valid CEL: Syntax error: extraneous input ')' expecting <EOF> at column 8",
        ),
        Violation.VARIABLE: ("shw == 'a'", "'shw' is not a field of a job; did you mean show?"),
        Violation.FUNCTION: ("timestamp(show) == 1", "the function 'timestamp' is not supported"),
    },
}
FAILED = {
    "workflow": {
        Violation.COST: (
            "input.all(x, x in input)",
            {"input": list(range(5000))},
            "The expression 'input.all(x, x in input)' would take too long for its input: move the work into a task.",
        ),
        Violation.LIST: (
            "input.size()",
            {"input": [0] * 10_001},
            "The expression 'input.size()' reads a list of 10001 items: use at most 10000.",
        ),
        Violation.NO_VALUE: ("input.n + 1", {"input": {}}, "The expression 'input.n + 1' has no value: KeyError: 'n'."),
    },
    "condition": {
        Violation.COST: (
            "tasks.all(t, t in env_names)",
            {"tasks": ["a"] * 300, "env_names": ["a"] * 300},
            "it is too expensive for lists of this length",
        ),
        Violation.NO_VALUE: (
            "labels.nope == 'x'",
            {"labels": {}},
            "there is no 'nope': test with has() or `in` first",
        ),
    },
}


def cases(table):
    return [
        pytest.param(DIALECTS[name], *case, id=f"{name}-{violation}")
        for name, by_violation in table.items()
        for violation, case in by_violation.items()
    ]


@pytest.mark.parametrize(("dialect", "text", "message"), cases(REFUSED))
def test_expression_that_a_dialect_does_not_allow_is_refused(dialect, text, message):
    with pytest.raises(InvalidInput) as refused:
        compile_guarded(text, dialect, "step a")
    assert refused.value.sentence == message


@pytest.mark.parametrize(("dialect", "text", "scope", "message"), cases(FAILED))
def test_evaluation_that_fails_says_why(dialect, text, scope, message):
    with pytest.raises(ExpressionError) as failed:
        compile_guarded(text, dialect, "step a").evaluate(scope)
    assert str(failed.value) == message


def test_every_text_of_both_dialects_is_used():
    assert {*REFUSED["workflow"], *FAILED["workflow"]} == set(SENTENCES)
    assert {*REFUSED["condition"], *FAILED["condition"]} == set(PHRASES)
    assert set(SENTENCES) | set(PHRASES) == set(Violation)


HIDDEN_LOOPS = {
    "a raw string that ends with a backslash": r"r'\' == '' || {loops} || ' ' != ''",
    "a triple-quoted string": "'''it's''' != '' || {loops} || '' == 'x'",
    "an escaped quote": r"'\'' != '' || {loops} || '' == 'x'",
    "a raw triple-quoted string": r"r'''\''' != '' || {loops} || ''' ''' == 'x'",
    "line breaks": "{broken}",
}


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("how", HIDDEN_LOOPS)
def test_nested_loops_cannot_hide_behind_literals(name, how):
    loops = "[1].all(a, [1].all(b, [1].all(c, true)))"
    text = HIDDEN_LOOPS[how].format(loops=loops, broken=loops.replace(".", "\n.\n"))
    with pytest.raises(InvalidInput, match=r"loop in a loop|at most 2 deep"):
        compile_guarded(text, DIALECTS[name], "step a")


def test_condition_cannot_use_the_other_name_of_exists_one():
    # A macro like the others: unless it is known as one, its loops are not counted.
    nested = "tasks.existsOne(show, tasks.existsOne(show, tasks.existsOne(show, show == '')))"
    with pytest.raises(InvalidInput, match="`existsOne` is not supported"):
        compile_guarded(nested, CONDITION_DIALECT)


@pytest.mark.parametrize("text", ["topic.matches_re2(show)", "topic.matches_re2('a')", "topic.matches(b'a')"])
def test_condition_cannot_match_a_pattern_that_was_not_checked(text):
    with pytest.raises(InvalidInput, match=r"'matches_re2' is not supported|one string literal"):
        compile_guarded(text, CONDITION_DIALECT)


@pytest.mark.parametrize(
    ("literal", "topic", "found"),
    [
        ("'^a+$'", "aaa", True),
        ("'''b'''", "abc", True),
        (r"r'^\d$'", "7", True),
        (r"'\\.'", "a.b", True),
        ("''", "", True),
    ],
)
def test_condition_matches_literal_patterns_of_every_form(literal, topic, found):
    condition = compile_guarded(f"topic.matches({literal}) && 'matches(' != topic", CONDITION_DIALECT)
    assert condition.evaluate({"topic": topic}) is found
    assert condition.evaluate({"topic": "-"}) is (literal == "''")


@pytest.mark.parametrize(
    "text",
    [
        "tasks.filter(t, t != '').size() > 0",  # copies its result for every item
        "tasks.all(t, t in tasks)",  # reads the list again for every item
        "tasks.all(a, tasks.all(b, a != b))",
        "tasks.exists(a, tasks.filter(b, a == b) == [])",
    ],
)
def test_condition_with_a_quadratic_cost_is_refused_for_long_lists_before_it_runs(text):
    condition = compile_guarded(text, CONDITION_DIALECT)
    began = time.process_time()
    with pytest.raises(ExpressionError, match="too expensive"):
        condition.evaluate({"tasks": [f"t{n}" for n in range(5000)]})
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize(
    "text",
    [
        "tasks.all(t, t != '')",
        "tasks.filter(t, t != '').size() > 0",
        "tasks.all(t, t in tasks)",
        "tasks.all(a, tasks.exists(b, a == b))",
        "tasks.exists(a, tasks.filter(b, a == b) != [])",
    ],
)
def test_longest_list_that_a_condition_accepts_is_evaluated_soon(text):
    condition = compile_guarded(text, CONDITION_DIALECT)
    longest = max(n for n in range(20_000) if within_cost(condition, n))
    began = time.process_time()
    assert condition.evaluate({"tasks": [f"t{n}" for n in range(longest)]}) is True
    assert longest >= 30
    assert time.process_time() - began < 0.2


def within_cost(condition, length):
    return estimate_cost(condition.shape, {("tasks",): length + 1}, length) <= CONDITION_LIMITS.cost_max


def test_value_is_found_although_a_literal_before_it_looks_like_a_path():
    expression = compile_guarded("'input[' + input.s + ']'", WORKFLOW_DIALECT, "it")
    assert expression.evaluate({"input": {"s": "x"}}) == "input[x]"
    loop = compile_guarded("input.all(x, {'input[': input, 'b': ']'} != {})", WORKFLOW_DIALECT, "it")
    assert loop.shape.loops[0].mentions == (("input",),)


def test_expression_receives_only_the_values_that_it_names():
    class Untouchable(dict):
        def __len__(self):
            raise AssertionError("a value that the expression does not name was read")

    scope = {"input": {"n": 1, "large": Untouchable()}, "run": Untouchable()}
    assert compile_guarded("input.n + 1", WORKFLOW_DIALECT, "it").evaluate(scope) == 2


def test_meter_is_spent_by_every_evaluation():
    meter = CostMeter(120)
    expression = compile_guarded("input + 1", WORKFLOW_DIALECT, "it")
    assert [expression.evaluate({"input": 1}, meter), expression.evaluate({"input": 2}, meter)] == [2, 3]
    assert meter.left < 60
    with pytest.raises(ExpressionError, match="too long together"):
        expression.evaluate({"input": 3}, meter)


def test_limits_of_conditions_are_at_most_those_of_workflows_except_nested_loops():
    for name in ("size_max", "bracket_depth_max", "cost_max"):
        assert getattr(CONDITION_LIMITS, name) < getattr(WORKFLOW_LIMITS, name)
    assert (WORKFLOW_LIMITS.loop_depth_max, CONDITION_LIMITS.loop_depth_max) == (1, 2)
