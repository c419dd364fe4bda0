"""Denials win in any policy at any position, and the rule index equals a linear search."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from rota.model.cel_guard import ExpressionError
from rota.model.policy.decision import PolicyEffect, PolicyRequest
from rota.policy.evaluate import CompiledPolicy
from rota.policy.expressions import Condition, ConditionContext
from rota.policy.globs import GlobSet
from rota.policy.rules import JobMatch, PolicyDocument, PolicyRule, PolicyRules, Velocity

NAMES = st.sampled_from(["a", "ab", "abc", "b", "x.y", "x.yz"])
GLOBS = st.sampled_from(["a", "ab", "a*", "*b", "*", "a?", "x.*", "b", "x.y", "?"])
CONDITIONS = st.sampled_from(
    [None, *map(Condition, ("frames > 2", "labels.k == 'a'", "frames", "'a' in risk_tags", "true"))]
)
EFFECTS = st.sampled_from(PolicyEffect)
PARTS = ("shows", "topics", "capabilities", "actor_ids", "risk_tags")


@st.composite
def rules(draw, effects=EFFECTS, name=""):
    names = draw(
        st.dictionaries(st.sampled_from(PARTS), st.lists(GLOBS, min_size=1, max_size=3).map(GlobSet), max_size=2)
    )
    labels = draw(st.dictionaries(st.just("k"), st.lists(GLOBS, min_size=1, max_size=2).map(GlobSet), max_size=1))
    chosen = draw(effects)
    counted = chosen not in (PolicyEffect.ALLOW, PolicyEffect.ALLOW_WITH_CONSTRAINTS) and draw(st.booleans())
    return PolicyRule(
        id=name or f"r{draw(st.integers(0, 10**12))}",
        line=1,
        says=chosen,
        match=JobMatch(names, labels, draw(st.sampled_from([(), ("a",)]))),
        when=draw(CONDITIONS),
        velocity=Velocity(1, 1.0, ("show",)) if counted else None,
    )


RULES = st.lists(rules(), max_size=6)
JOBS = st.builds(
    PolicyRequest,
    show=NAMES,
    topic=NAMES,
    capability=NAMES,
    actor_id=NAMES,
    risk_tags=st.lists(NAMES, max_size=2).map(tuple),
    requires=st.sampled_from([(), ("a",)]),
    labels=st.dictionaries(st.just("k"), NAMES, max_size=1),
    frames=st.integers(1, 4),
)
DEFAULTS = st.sampled_from([PolicyEffect.ALLOW, PolicyEffect.DENY])


def policy(ordered, default):
    return CompiledPolicy(PolicyDocument(source="", rules=PolicyRules(tuple(ordered), default)), "s")


def possible_effects(ruling):
    """All effects that the decision and its rate limits may have."""
    return {ruling.word.says, *(limit.over.says for limit in ruling.limits)}


def matches(rule, job):
    """None: its condition fails to evaluate."""
    if rule.match.first_mismatch(job):
        return False
    try:
        return rule.when is None or rule.when.holds(ConditionContext(job))
    except ExpressionError:
        return None


@given(RULES, DEFAULTS, JOBS)
def test_matching_denial_denies(ordered, default, job):
    denying = [rule for rule in ordered if rule.says is PolicyEffect.DENY and not rule.velocity]
    if any(matches(rule, job) is not False for rule in denying):
        assert possible_effects(policy(ordered, default).evaluate(job)) == {PolicyEffect.DENY}


@given(RULES, DEFAULTS, JOBS, rules(st.just(PolicyEffect.DENY), "added"), st.integers(0, 6))
def test_added_denial_never_allows_more(ordered, default, job, denial, at):
    before = policy(ordered, default).evaluate(job)
    after = policy([*ordered[:at], denial, *ordered[at:]], default).evaluate(job)
    assert after.word.says in (before.word.says, PolicyEffect.DENY)
    if after.word.says is not PolicyEffect.DENY:
        assert after.word == before.word
        kept = [limit for limit in after.limits if limit.rule != denial.id]
        assert kept == list(before.limits)


@given(RULES, DEFAULTS, JOBS, st.randoms(use_true_random=False))
def test_position_of_denials_changes_only_which_one_is_named(ordered, default, job, chance):
    others = [rule for rule in ordered if rule.says is not PolicyEffect.DENY]
    moved = list(others)
    for rule in ordered:
        if rule.says is PolicyEffect.DENY:
            moved.insert(chance.randint(0, len(moved)), rule)
    before, after = (policy(each, default).evaluate(job) for each in (ordered, moved))
    assert before.word.says == after.word.says
    if before.word.says is not PolicyEffect.DENY:
        assert before.word == after.word
        assert {limit.rule for limit in before.limits} == {limit.rule for limit in after.limits}


@given(RULES, DEFAULTS, JOBS)
def test_rule_index_equals_a_linear_search(ordered, default, job):
    ruling = policy(ordered, default).evaluate(job)
    assert ruling.word.says is evaluate_linearly(ordered, default, job)


def evaluate_linearly(ordered, default, job):
    """Rule by rule, in the order that `rota.policy.evaluate` documents."""
    for rule in ordered:
        found = matches(rule, job)
        if rule.says is PolicyEffect.DENY and (found is None or (found and not rule.velocity)):
            return PolicyEffect.DENY
    for rule in ordered:
        if (found := matches(rule, job)) is None:
            return PolicyEffect.DENY
        if found and not rule.velocity:
            return rule.says
    return default


@given(RULES, DEFAULTS, JOBS)
def test_decision_is_independent_of_label_order(ordered, default, job):
    one = policy(ordered, default)
    first = msgspec.structs.replace(job, labels={"x": "1", "k": "a"})
    second = msgspec.structs.replace(job, labels={"k": "a", "x": "1"})
    assert one.evaluate(first) is one.evaluate(second)
