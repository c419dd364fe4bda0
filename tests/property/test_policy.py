"""Denials win, whatever else stands in a policy and wherever they stand; and an index finds what a plain look does."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from rota.model.policy.decision import PolicyEffect, PolicyRequest
from rota.policy.evaluate import CompiledPolicy
from rota.policy.expressions import Condition, ConditionContext, ConditionError
from rota.policy.globs import GlobSet
from rota.policy.rules import JobMatch, PolicyDocument, PolicyRule, PolicyRules, Velocity

WORDS = st.sampled_from(["a", "ab", "abc", "b", "x.y", "x.yz"])
GLOBS = st.sampled_from(["a", "ab", "a*", "*b", "*", "a?", "x.*", "b", "x.y", "?"])
CONDITIONS = st.sampled_from(
    [None, *map(Condition, ("frames > 2", "labels.k == 'a'", "frames", "'a' in risk_tags", "true"))]
)
SAYS = st.sampled_from(PolicyEffect)
PARTS = ("shows", "topics", "capabilities", "actor_ids", "risk_tags")


@st.composite
def rules(draw, says=SAYS):
    names = draw(
        st.dictionaries(st.sampled_from(PARTS), st.lists(GLOBS, min_size=1, max_size=3).map(GlobSet), max_size=2)
    )
    labels = draw(st.dictionaries(st.just("k"), st.lists(GLOBS, min_size=1, max_size=2).map(GlobSet), max_size=1))
    chosen = draw(says)
    counted = chosen not in (PolicyEffect.ALLOW, PolicyEffect.ALLOW_WITH_CONSTRAINTS) and draw(st.booleans())
    return PolicyRule(
        id=f"r{draw(st.integers(0, 10**12))}",
        line=1,
        says=chosen,
        match=JobMatch(names, labels, draw(st.sampled_from([(), ("a",)]))),
        when=draw(CONDITIONS),
        velocity=Velocity(1, 1.0, ("show",)) if counted else None,
    )


RULES = st.lists(rules(), max_size=6)
JOBS = st.builds(
    PolicyRequest,
    show=WORDS,
    topic=WORDS,
    capability=WORDS,
    actor_id=WORDS,
    risk_tags=st.lists(WORDS, max_size=2).map(tuple),
    requires=st.sampled_from([(), ("a",)]),
    labels=st.dictionaries(st.just("k"), WORDS, max_size=1),
    frames=st.integers(1, 4),
)
DEFAULTS = st.sampled_from([PolicyEffect.ALLOW, PolicyEffect.DENY])


def policy(ordered, default):
    return CompiledPolicy(PolicyDocument(source="", rules=PolicyRules(tuple(ordered), default)), "s")


def words(ruling):
    """All that may be said, by which limits have a place."""
    return {ruling.word.says, *(limit.over.says for limit in ruling.limits)}


def is_for(rule, job):
    """None: its condition gives no answer."""
    if rule.match.first_mismatch(job):
        return False
    try:
        return rule.when is None or rule.when.holds(ConditionContext(job))
    except ConditionError:
        return None


@given(RULES, DEFAULTS, JOBS)
def test_a_denial_that_is_for_a_job_denies_it(ordered, default, job):
    denying = [rule for rule in ordered if rule.says is PolicyEffect.DENY and not rule.velocity]
    if any(is_for(rule, job) is not False for rule in denying):
        assert words(policy(ordered, default).evaluate(job)) == {PolicyEffect.DENY}


@given(RULES, DEFAULTS, JOBS, rules(st.just(PolicyEffect.DENY)), st.integers(0, 6))
def test_adding_a_denial_never_allows(ordered, default, job, denial, at):
    before = policy(ordered, default).evaluate(job)
    after = policy([*ordered[:at], denial, *ordered[at:]], default).evaluate(job)
    assert after.word.says in (before.word.says, PolicyEffect.DENY)
    if after.word.says is not PolicyEffect.DENY:
        assert after.word == before.word
        kept = [limit for limit in after.limits if limit.rule != denial.id]
        assert kept == list(before.limits)


@given(RULES, DEFAULTS, JOBS, st.randoms(use_true_random=False))
def test_where_denials_stand_changes_nothing_but_which_is_named(ordered, default, job, chance):
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
def test_the_index_finds_what_a_plain_look_finds(ordered, default, job):
    ruling = policy(ordered, default).evaluate(job)
    assert ruling.word.says is plainly(ordered, default, job)


def plainly(ordered, default, job):
    """The order of the module's docstring, one rule after the other."""
    for rule in ordered:
        found = is_for(rule, job)
        if rule.says is PolicyEffect.DENY and (found is None or (found and not rule.velocity)):
            return PolicyEffect.DENY
    for rule in ordered:
        if (found := is_for(rule, job)) is None:
            return PolicyEffect.DENY
        if found and not rule.velocity:
            return rule.says
    return default


@given(RULES, DEFAULTS, JOBS)
def test_the_same_job_is_ruled_on_the_same_however_its_labels_are_ordered(ordered, default, job):
    one = policy(ordered, default)
    first = msgspec.structs.replace(job, labels={"x": "1", "k": "a"})
    second = msgspec.structs.replace(job, labels={"k": "a", "x": "1"})
    assert one.evaluate(first) is one.evaluate(second)
