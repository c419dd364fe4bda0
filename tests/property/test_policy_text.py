"""Any file or expression is either a valid policy or refused in one sentence with its line."""

import re
from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from rota.infra.yaml_reader import parse_yaml
from rota.model.cel_guard import ExpressionError
from rota.model.errors import InvalidInput
from rota.model.policy.decision import PolicyEffect, PolicyRequest
from rota.policy.evaluate import CompiledPolicy
from rota.policy.expressions import Condition, ConditionContext
from rota.policy.globs import GlobSet, validate_glob

JOB = PolicyRequest(show="alpha", topic="job.a", labels={"env": "dev"}, tasks=("t",), risk_tags=("r", "s"))
GOOD = """
version: 1
default_decision: allow
rules:
  - id: a
    match: {topics: ["job.*"], labels: {env: [dev, "p*"]}}
    when: frames > 3 && topic.matches('^job')
    velocity: {max_requests: 3, window: 1min, key: tenant}
    decision: throttle
    delay: 5s
  - id: b
    decision: require_human
    approval: {quorum: 2, expires: 1h, approvers: [ann, bob]}
    constraints: {budgets: {max_retries: 1}, sandbox: {x: [1, two]}}
"""
FRAGMENTS = st.sampled_from(
    [
        *"{}[]:,-&*!|>'\"#%@`?\n \t",
        "rules",
        "id",
        "when",
        "match",
        "decision",
        "allow",
        "1",
        "~",
        "a" * 300,
        "§",
        "é",
        "\x00",
    ]
)
TOKENS = st.sampled_from(
    [
        *(
            "show",
            "frames",
            "labels",
            "tasks",
            "labels.env",
            "labels.nope",
            "x",
            "true",
            "1",
            "2.5",
            "'a'",
            '"b"',
            "r'c'",
        ),
        *(
            "(",
            ")",
            "[",
            "]",
            "{",
            "}",
            ".",
            ",",
            "?",
            ":",
            "!",
            "-",
            "+",
            "*",
            "/",
            "%",
            "==",
            "<",
            ">=",
            "&&",
            "||",
            "in",
        ),
        *(
            ".all(x, ",
            ".exists(x,",
            ".filter(",
            ".map(",
            ".size()",
            "has(",
            ".matches('a+')",
            ".startsWith(",
            " ",
            "\n",
        ),
    ]
)
FILE_AND_LINE = re.compile(r"policy:\d+: .*[.?]")


def result_or_error(make, text):
    """The result for the text, or the sentence of its refusal."""
    try:
        return make(text), ""
    except InvalidInput as refused:
        return None, refused.sentence


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, len(GOOD)), st.integers(0, 6), FRAGMENTS), max_size=5))
def test_damaged_policy_file_is_valid_or_refused_with_its_line(edits):
    text = GOOD
    for at, removed, inserted in edits:
        text = text[:at] + inserted + text[at + removed :]
    policy, refused = result_or_error(CompiledPolicy.of, text)
    if policy is None:
        assert FILE_AND_LINE.fullmatch(refused), refused
    else:
        assert policy.evaluate(JOB).word.says in PolicyEffect


@settings(deadline=None, max_examples=100)
@given(st.text(FRAGMENTS.map(lambda fragment: fragment[0]), max_size=60))
def test_any_text_is_parsed_or_refused(text):
    with suppress(InvalidInput):
        parse_yaml(text, "policy")


@settings(deadline=None, max_examples=200)
@given(st.lists(TOKENS, max_size=14).map("".join))
def test_any_expression_is_refused_evaluates_or_fails_cleanly(text):
    condition, refused = result_or_error(Condition, text)
    assert condition or "\n" not in refused
    with suppress(ExpressionError):
        assert condition is None or condition.holds(ConditionContext(JOB)) in (True, False)


@given(st.text("ab*?", min_size=1, max_size=8), st.text("ab", max_size=8))
def test_globs_match_like_shell_globs(glob, name):
    try:
        validate_glob(glob)
    except InvalidInput:
        return
    pattern = "".join({"*": ".*", "?": "."}.get(char, char) for char in glob)
    assert GlobSet([glob]).matches(name) is bool(re.fullmatch(pattern, name))
