"""The output sections of a policy file: valid ones are parsed whole, invalid ones refused with their line."""

import pytest

from rota.model.errors import InvalidInput
from rota.model.policy.outputs import OutputEffect, OutputScanMode
from rota.policy.loader import parse

GOOD = """
default_decision: allow
output_policy:
  enabled: true
  fail_mode: open
  topics: {job.pay.*: hold, job.*: fail_closed}
output_rules:
  - id: secrets
    description: Nothing secret leaves.
    match:
      shows: [film]
      tenants: acme
      topics: [job.*]
      capabilities: [gpu]
      risk_tags: [network]
      labels: {team: x}
      scanners: [secret, pii]
      detectors: [secret_leak]
      content_patterns: ['\\d{4}-secret']
      keywords: [classified]
      content_types: [text/*]
      output_size_gt: 10
      max_output_bytes: 1000
      has_error: false
    decision: QUARANTINE
    severity: critical
    reason: It is secret.
    enabled: false
"""
INVALID = [
    ("output_policy: {enable: true}", 2, "did you mean enabled?"),
    ("output_policy: {fail_mode: maybe}", 2, "one of"),
    ("output_policy:\n  topics: {'job.[a': hold}", 3, "not a valid glob"),
    ("output_policy:\n  topics: {job.a: never}", 3, "one of"),
    ("output_rules: 5", 2, "list"),
    ("output_rules:\n  - {decision: allow}", 3, "needs id"),
    ("output_rules:\n  - {id: a}", 3, "needs decision"),
    ("output_rules:\n  - {id: a, decision: maybe}", 3, "decision is one of"),
    ("output_rules:\n  - {id: a, decision: allow}\n  - {id: a, decision: deny}", 4, "rename one"),
    ("output_rules:\n  - id: a\n    decision: deny\n    match:\n      topic: [x]", 6, "did you mean topics?"),
    (
        "output_rules:\n  - id: a\n    decision: deny\n    match:\n      topics: [ok,\n        'a**']",
        7,
        "not a valid glob",
    ),
    ("output_rules:\n  - id: a\n    decision: deny\n    match: {scanners: [virus]}", 5, "a scanner is one of"),
    (
        "output_rules:\n  - id: a\n    decision: deny\n    match: {content_patterns: ['(']}",
        5,
        "not a valid RE2 pattern",
    ),
    (
        "output_rules:\n  - id: a\n    decision: deny\n    match: {content_patterns: ['((a{999}){999}){999}']}",
        5,
        "not a valid RE2 pattern",
    ),
    ("output_rules:\n  - id: a\n    decision: deny\n    match: {content_patterns: ['x*']}", 5, "match everywhere"),
    ("output_rules:\n  - id: a\n    decision: deny\n    match: {output_size_gt: -1}", 5, "whole number"),
    ("output_rules:\n  - id: a\n    decision: deny\n    match: {has_error: perhaps}", 5, "true or false"),
]


def test_output_sections_are_parsed_whole():
    sections = parse(GOOD).sections
    assert sections["output_policy"].topics == {"job.pay.*": OutputScanMode.HOLD, "job.*": OutputScanMode.FAIL_CLOSED}
    assert sections["output_policy"].fail_mode is OutputScanMode.PASS
    [rule] = sections["output_rules"]
    assert (rule.id, rule.decision, rule.severity, rule.enabled) == (
        "secrets",
        OutputEffect.QUARANTINE,
        "critical",
        False,
    )
    assert (rule.match.tenants, rule.match.content_patterns) == (("acme",), (r"\d{4}-secret",))
    assert (rule.match.output_size_gt, rule.match.has_error) == (10, False)


@pytest.mark.parametrize(("text", "line", "message"), INVALID)
def test_invalid_output_section_is_refused_with_its_line(text, line, message):
    with pytest.raises(InvalidInput) as refused:
        parse(f"default_decision: allow\n{text}\n", "p.yaml")
    assert refused.value.sentence.startswith(f"p.yaml:{line}: ")
    assert message in refused.value.sentence
