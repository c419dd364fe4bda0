"""Values written into expressions evaluate to themselves."""

from hypothesis import given
from hypothesis import strategies as st

from rota.model.workflows.expressions import compile_expression, compile_template
from rota.sdk.workflow.deferred_values import DeferredValue, to_expression

PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-(2**62), 2**62)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=40)
)
VALUES = st.recursive(
    PLAIN,
    lambda part: st.lists(part, max_size=4) | st.dictionaries(st.text(max_size=8), part, max_size=4),
    max_leaves=8,
)


@given(VALUES)
def test_value_in_an_expression_evaluates_to_itself(value):
    assert compile_expression(to_expression(value), "a test")({}) == value


@given(st.text(max_size=20), st.text(max_size=20))
def test_texts_in_expressions_compare_exactly(one, other):
    template = compile_template(str(DeferredValue("input")["key"] == other), "a test")
    assert template({"input": {"key": one}}) is (one == other)


@given(st.text(min_size=1, max_size=20), VALUES)
def test_any_key_is_found_by_an_expression(key, value):
    template = compile_template(f"{DeferredValue('input')[key]}", "a test")
    assert template({"input": {key: value}}) == value
