"""An invalid policy file is refused whole, with the line and one sentence."""

import pytest

from rota.infra.yaml_reader import FILE_BYTES_MAX
from rota.model.errors import InvalidInput
from rota.policy.loader import load, parse, snapshot_id

RULE = "rules:\n  - id: it\n    decision: deny\n    "


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "empty"),
        ("- a", 1, "mapping"),
        ("version: 7", 1, "version"),
        ("\nverison: 1", 2, "did you mean version?"),
        ("default_decision: alow", 1, "one of allow"),
        ("default_decision: throttle", 1, "one of allow"),
        ("rules: 3", 1, "list"),
        ("rules:\n  - decision: deny", 2, "needs id"),
        ("rules:\n  - id: a", 2, "needs decision"),
        ("rules:\n  - id: a\n    decision: maybe", 3, "decision is one of"),
        ("rules:\n  - {id: a, decision: deny}\n  - {id: a, decision: deny}", 3, "is already defined in line 2"),
        (RULE + "mach: {}", 4, "did you mean match?"),
        (RULE + "match:\n      topic: [a]", 5, "did you mean topics?"),
        (RULE + "match:\n      topics: ['job.[ab]']", 5, "is not a valid glob because of '['"),
        (RULE + "match:\n      topics: ['job.**']", 5, "is not a valid glob because of '**'"),
        (RULE + "match:\n      topics: ['*a*a*a*a*']", 5, "at most 4 *"),
        (RULE + "match:\n      topics: [" + "a" * 300 + "]", 5, "1 to 200 characters"),
        (RULE + "match:\n      topics: [{a: b}]", 5, "a non-empty text is required here"),
        (RULE + "match:\n      topics: [" + "a, " * 1001 + "]", 5, "1000 entries at most"),
        (RULE + "match: {labels: [a]}", 4, "labels must be a mapping"),
        (RULE + "when: shw == 'a'", 4, "did you mean show?"),
        (RULE + "when: show ==", 4, "this is not valid CEL"),
        (RULE + "when: topic.matches('(a{1,999}){1,999}')", 4, "is not a valid RE2 pattern"),
        (RULE + "when: topic.matches('(?=a)b')", 4, "is not a valid RE2 pattern"),
        (RULE + "when: topic.matches('" + "a" * 1500 + "')", 4, "a pattern can have"),
        (RULE + "when: topic.matches(show)", 4, "one string literal"),
        (RULE + "when: topic.matches('a' + show)", 4, "one string literal"),
        (RULE + "when: tasks.map(t, t + t).map(t, t + t).size() > 0", 4, "`map` is not supported"),
        (RULE + "when: tasks.all(a, tasks.all(b, tasks.all(c, true)))", 4, "at most 2 deep"),
        (RULE + "when: " + "(" * 40 + "true" + ")" * 40, 4, "at most 24 deep"),
        (RULE + "when: '" + "!" * 3000 + "true'", 4, "2048 bytes"),
        (RULE + "when: timestamp('2030-01-01T00:00:00Z') > timestamp('2029-01-01T00:00:00Z')", 4, "is not supported"),
        (RULE + 'when: "true // why"', 4, "comments"),
        (RULE + "velocity: {max_requests: 3}", 4, "window"),
        (RULE + "velocity: {window: 1min}", 4, "max_requests"),
        (RULE + "velocity: {max_requests: 3, window: soon}", 4, "is not a valid duration"),
        (RULE + "velocity: {max_requests: -3, window: 1s}", 4, "whole number from 0"),
        (RULE + "velocity: {max_requests: 3, window: 1s, key: colour}", 4, "key cannot count by"),
        (RULE + "approval: {quorum: 2}", 4, "no effect with the decision deny"),
        (RULE + "delay: 2s", 4, "no effect with the decision deny"),
        (RULE + "constraints: {}", 4, "no effect with the decision deny"),
        (RULE + "remediations: [{title: a}]", 4, "needs id"),
        ("rules:\n  - id: a\n    decision: allow\n    velocity: {max_requests: 1, window: 1s}", 4, "no effect"),
        ("rules:\n  - id: a\n    decision: allow_with_constraints", 2, "has none"),
        ("rules:\n  - id: a\n    decision: allow\n    constraints:\n      budget: {}", 5, "did you mean budgets?"),
        (
            "rules:\n  - id: a\n    decision: allow\n    constraints:\n      budgets:\n        max_runtime_ms: 1.5",
            6,
            "whole number",
        ),
        (
            "rules:\n  - id: a\n    decision: require_human\n    approval: {quorum: 2, approvers: [ann]}",
            4,
            "cannot be met",
        ),
        ("rules:\n  - id: a\n    decision: throttle\n    delay: 5", 4, "is not a valid duration"),
        ("input_policy: {fail_mode: ajar}", 1, "fail_mode is one of closed, open"),
        ("a: &x [*x]", 1, "anchors and aliases"),
        ("rules: !!python/object:os.system [a]", 1, "tags are not supported"),
        ("version: 1\n---\nversion: 1", 2, "second document"),
        ("version: 1\nversion: 1", 2, "is given twice"),
        ("rules: " + "[" * 100_000, 1, "nested deeper"),
        ("rules: [\n}", 2, "this is not YAML"),
        ("rules:\n  - id: 'a\\tb\x07'", 2, ""),
    ],
)
def test_invalid_policy_file_is_refused_with_its_line(text, line, message):
    with pytest.raises(InvalidInput) as refused:
        parse(text, "p.yaml")
    assert refused.value.sentence.startswith(f"p.yaml:{line}: ") or "characters" in refused.value.sentence
    assert message in refused.value.sentence
    assert "\n" not in refused.value.sentence


def test_policy_file_over_the_size_limit_is_refused(tmp_path):
    path = tmp_path / "policy.yaml"
    rule = "  - {id: r%d, decision: deny, match: {shows: [alpha], topics: [job.render]}}\n"
    path.write_text("rules:\n" + "".join(rule % n for n in range(30_000)))
    assert path.stat().st_size > 2 * FILE_BYTES_MAX
    with pytest.raises(InvalidInput, match=r"policy\.yaml:\d+: the file is larger than 1024 KiB"):
        load(path)


def test_policy_file_with_too_many_rules_is_refused():
    with pytest.raises(InvalidInput, match="5000 entries at most"):
        parse("rules:\n" + "".join(f"  - {{id: r{n}, decision: deny}}\n" for n in range(5001)))


@pytest.mark.parametrize(
    "make", [lambda path: path.mkdir(), lambda path: path.write_bytes(b"\xff\xfe\n"), lambda path: None]
)
def test_unreadable_policy_file_is_refused(tmp_path, make):
    path = tmp_path / "policy.yaml"
    make(path)
    with pytest.raises(InvalidInput):
        load(path)


def test_policy_snapshot_is_a_hash_of_the_file():
    assert snapshot_id("version: 1") == snapshot_id("version: 1") != snapshot_id("version: 1 ")


def test_policy_file_may_set_the_fail_mode():
    assert parse("input_policy: {fail_mode: open}").fail_mode == "open"
    assert parse("version: 1").fail_mode is None
