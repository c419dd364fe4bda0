"""The guard of CEL reads a text as the parser does, never fails otherwise than it says, and its estimate only grows."""

from contextlib import suppress

import cel
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from rota.model.cel_guard import (
    ExpressionError,
    blank_literals,
    compile_guarded,
    estimate_cost,
)
from rota.model.errors import InvalidInput
from rota.model.workflows.cel import WORKFLOW_DIALECT
from rota.policy.expressions import CONDITION_DIALECT

DIALECTS = st.sampled_from([WORKFLOW_DIALECT, CONDITION_DIALECT])
SCOPE = {
    "input": {"l": [1, 2], "s": "x"}, "steps": {"a": {"output": 1}}, "run": {"id": "r"}, "round": {}, "item": 1,
    "show": "alpha", "tasks": ["a", "b"], "labels": {"env": "dev"}, "frames": 3, "topic": "job.a",
}  # fmt: skip
CODE = st.sampled_from(
    [
        *("input", "input.l", "steps.a.output", "item", "tasks", "labels.env", "frames", "x", "1", "2.5", "true"),
        *("(", ")", "[", "]", "{", "}", ".", ",", "?", ":", "!", "-", "+", "*", "==", "<", "&&", "||", " in ", "\n"),
        *(".all(x, ", ".exists(x,", ".filter(x,", ".map(x, ", ".existsOne(x,", ". all (x,", "matches(", ".matches("),
        *("size(", "has(", "//", ".tasks", "\\", "'", '"', "r'", "§", " "),
    ]
)
CONTENTS = st.lists(
    st.sampled_from(["a", " ", "//", "input[", "]", ".all(x, ", "(", ")", "steps.a", "matches('", "\\", "'", '"', "+"]),
    max_size=5,
).map("".join)


@st.composite
def literals(draw):
    """A string or bytes literal of any form, with any content that the form can hold."""
    quote = draw(st.sampled_from(["'", '"', "'''", '"""']))
    prefix = draw(st.sampled_from(["", "r", "R", "b", "br"]))
    content = draw(CONTENTS)
    if "r" in prefix.lower():
        assume(quote[0] not in content)
    else:
        content = content.replace("\\", "\\\\").replace(quote[0], "\\" + quote[0])
    return f"{prefix}{quote}{content}{quote}"


SOUP = st.lists(CODE | literals(), max_size=10).map("".join)
LEAVES = literals() | st.sampled_from(
    ["input.l", "steps.a.output", "tasks", "labels.env", "frames", "x", "1", "[1, 2]"]
)
FORMS = st.sampled_from(
    ["{0} == {1}", "({0}) || ({1})", "[{0}, {1}]", "{{{0}: {1}}}", "!({0} in [{1}])", "size({0} + {1})", "{0}[{1}]"]
    + [f"[{{0}}].{macro}(x, {{1}})" for macro in ("all", "exists", "exists_one", "existsOne", "filter", "map")]
    + [f"tasks\n. {macro} (y,{{0}}) != {{1}}" for macro in ("all", "filter", "map")]
)
EXPRESSIONS = st.recursive(
    LEAVES, lambda parts: st.tuples(FORMS, parts, parts).map(lambda each: each[0].format(*each[1:])), max_leaves=6
)
TEXTS = EXPRESSIONS | SOUP


@settings(deadline=None, max_examples=300)
@given(TEXTS, DIALECTS)
def test_any_text_is_refused_in_one_line_or_evaluates_or_fails_cleanly(text, dialect):
    expression, refused = compiled_or_refused(text, dialect)
    assert "\n" not in refused
    with suppress(ExpressionError):
        assert expression is None or expression.evaluate(SCOPE) is not expression


def compiled_or_refused(text, dialect):
    try:
        return compile_guarded(text, dialect, "it"), ""
    except InvalidInput as refused:
        return None, refused.sentence


@settings(deadline=None, max_examples=300)
@given(TEXTS, DIALECTS)
def test_accepted_text_has_no_loop_or_variable_that_the_guard_did_not_find(text, dialect):
    expression, _ = compiled_or_refused(text, dialect)
    event("accepted" if expression else "refused")
    if expression is None:
        return
    shape, program = expression.shape, cel.compile(text)
    bound = {loop.variable for loop in flatten(shape.loops)}
    assert {name for name in program.variables() if name not in bound} <= {path[0] for path in shape.mentions}
    # Only loops expand to these operators, except for + where it is written.
    expanded = {"@not_strictly_false"} | ({"_+_"} if not shape.pluses else set())
    assert shape.loops or not expanded & set(program.functions())


def flatten(loops):
    return [found for loop in loops for found in (loop, *flatten(loop.inner))]


@settings(deadline=None)
@given(st.lists(literals(), min_size=1, max_size=4))
def test_literals_of_every_form_are_blanked_and_nothing_else(found):
    text = " == ".join(found)
    for literal in found:
        cel.compile(literal)
    blanked = blank_literals(text)
    assert blanked.split(" == ") == ['"' + " " * (len(literal) - 2) + '"' for literal in found]


LOOPS = st.sampled_from(
    ["tasks.all(a, {0})", "tasks.exists(a, {0})", "tasks.filter(a, {0}) == []", "tasks.all(a, {0})"]
)
BODIES = st.sampled_from(
    ["a != ''", "a in tasks", "labels.env == a", "tasks.all(b, a != b)", "tasks.filter(b, true) == []"]
)
SIZES = st.integers(0, 1000)


@given(LOOPS, BODIES, SIZES, SIZES, st.integers(0, 100))
def test_estimate_grows_with_the_values_and_counts_every_pass_of_every_loop(loop, body, length, more, label_size):
    shape = compile_guarded(loop.format(body), CONDITION_DIALECT).shape

    def cost(length):
        return estimate_cost(shape, {("tasks",): 1 + length, ("labels", "env"): label_size}, length)

    assert cost(length) <= cost(length + more)
    assert cost(length) >= length * max(len(body) // 8, 1)
    if "tasks" in body:
        assert cost(length) >= length**2
    if "filter" in loop:
        assert cost(length) >= length**2 // 2
