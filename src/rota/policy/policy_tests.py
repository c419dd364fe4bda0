"""Tests of a policy: cases, each with a job and the expected decision.

    cases:
      - name: renders of alpha run
        job: {show: alpha, topic: job.render.beauty, frames: 100}
        expect: allow
        rule: renders
      - name: deny emptying a bucket
        submission: {show: alpha, topic: job.clean, layers: [{argv: [s3, rm, -r]}], risk_tags: [destructive]}
        expect: deny

`job` holds fields of `rota.model.policy.decision.PolicyRequest`, `submission` a whole submission. Velocity limits do
not count here: every case is treated as the first job.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from rota.infra.yaml_reader import YamlNode, YamlReader, check_text_size, parse_yaml
from rota.model.errors import InvalidInput
from rota.model.jobs.submission import Submission
from rota.model.jobs.validation import validate_submission
from rota.model.policy.decision import PolicyEffect, PolicyRequest
from rota.policy.evaluate import CompiledPolicy
from rota.policy.loader import DECISIONS
from rota.policy.request_builder import input_of_submission, request_of_input

T = TypeVar("T")

CASES_MAX: Final = 5000
REQUEST_FIELDS: Final = tuple(field.name for field in msgspec.structs.fields(PolicyRequest))


class PolicyTestCase(msgspec.Struct, frozen=True):
    name: str
    line: int
    asked: PolicyRequest
    expect: PolicyEffect
    rule: str | None = None


class PolicyTestResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a case."""

    name: str
    line: int
    passed: bool
    expected: str
    said: PolicyEffect
    rule: str
    """Empty: the default decided."""
    reason: str


class PolicyTestReport(msgspec.Struct, frozen=True, kw_only=True):
    snapshot: str
    passed: int
    failed: int
    cases: list[PolicyTestResult]


def run_cases(policy: str, cases: str, source: str = "policy", cases_source: str = "cases") -> PolicyTestReport:
    """Raises InvalidInput for an invalid file."""
    rules = CompiledPolicy.of(policy, source)
    results = [_run_case(rules, case) for case in read_cases(cases, cases_source)]
    passed = sum(result.passed for result in results)
    return PolicyTestReport(snapshot=rules.snapshot, passed=passed, failed=len(results) - passed, cases=results)


def _run_case(policy: CompiledPolicy, case: PolicyTestCase) -> PolicyTestResult:
    decision = policy.evaluate(case.asked).word
    as_expected = decision.says is case.expect or (
        case.expect is PolicyEffect.ALLOW and decision.says is PolicyEffect.ALLOW_WITH_CONSTRAINTS
    )
    return PolicyTestResult(
        name=case.name,
        line=case.line,
        passed=as_expected and case.rule in (None, decision.rule),
        expected=case.expect if case.rule is None else f"{case.expect} by {case.rule}",
        said=decision.says,
        rule=decision.rule,
        reason=decision.reason,
    )


def read_cases(text: str, source: str = "cases") -> list[PolicyTestCase]:
    return _PolicyTestReader(source).document(parse_yaml(check_text_size(text, source), source))


class _PolicyTestReader(YamlReader):
    def document(self, node: YamlNode | None) -> list[PolicyTestCase]:
        found = self.fields(node, "a file of cases", {"cases": self._cases})
        return found.get("cases") or []

    def _cases(self, node: YamlNode) -> list[PolicyTestCase]:
        return [self._case(each) for each in self.items(node, "cases", CASES_MAX)]

    def _case(self, node: YamlNode) -> PolicyTestCase:
        found = self.fields(
            node,
            "a case",
            {
                "name": self.string,
                "job": self._job,
                "submission": self._submission,
                "expect": lambda value: self.one_of(value, "expect", DECISIONS),
                "rule": self.string,
            },
        )
        if "expect" not in found or ("job" in found) == ("submission" in found):
            raise self.error(node, "a case needs expect, and either job or submission")
        request = found.get("job") or found["submission"]
        name = found.get("name") or f"{request.topic} of {request.show}"
        return PolicyTestCase(name, node.line, request, found["expect"], found.get("rule"))

    def _job(self, node: YamlNode) -> PolicyRequest:
        fields = self.fields(node, "a job", dict.fromkeys(REQUEST_FIELDS, self.to_builtins))
        return self._convert(node, {"show": "default", "topic": "default", **fields}, PolicyRequest)

    def _submission(self, node: YamlNode) -> PolicyRequest:
        submission = self._convert(node, self.to_builtins(node), Submission)
        try:
            return request_of_input(input_of_submission(validate_submission(submission, may_be_critical=True)))
        except InvalidInput as error:
            raise self.error(node, error.sentence) from None

    def _convert(self, node: YamlNode, value: object, into: type[T]) -> T:
        try:
            return msgspec.convert(value, into)
        except msgspec.ValidationError as error:
            raise self.error(node, str(error).replace(" - at `$", " at `")) from None
