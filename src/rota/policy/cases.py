"""What a policy is meant to say, written beside it: cases, each with a job and the decision that is expected.

    cases:
      - name: renders of alpha run
        job: {show: alpha, topic: job.render.beauty, frames: 100}
        expect: allow
        rule: renders
      - name: nobody empties a bucket
        submission: {show: alpha, topic: job.clean, layers: [{argv: [s3, rm, -r]}], risk_tags: [destructive]}
        expect: deny

`job` names what rules look at (`rota.model.policy.Asked`), `submission` is a whole one as it is submitted. A velocity
limit counts nothing here: every case is the first of its kind.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from rota.model.errors import InvalidInput
from rota.model.job import Submission
from rota.model.job_plan import plan
from rota.model.policy import Asked, Says
from rota.policy.asking import asked_of, seen_of
from rota.policy.evaluate import Policy
from rota.policy.load import DECISIONS
from rota.policy.reading import Node, Reader, checked_size, tree

T = TypeVar("T")

CASES_MAX: Final = 5000
FIELDS: Final = tuple(field.name for field in msgspec.structs.fields(Asked))


class Case(msgspec.Struct, frozen=True):
    name: str
    line: int
    asked: Asked
    expect: Says
    rule: str | None = None


class CaseEnd(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a case."""

    name: str
    line: int
    passed: bool
    expected: str
    said: Says
    rule: str
    """Empty: the default decided."""
    reason: str


class Tested(msgspec.Struct, frozen=True, kw_only=True):
    snapshot: str
    passed: int
    failed: int
    cases: list[CaseEnd]


def tried(policy: str, cases: str, source: str = "policy", cases_source: str = "cases") -> Tested:
    """Raises InvalidInput for a file that is wrong."""
    rules = Policy.of(policy, source)
    ends = [_end(rules, case) for case in read(cases, cases_source)]
    passed = sum(end.passed for end in ends)
    return Tested(snapshot=rules.snapshot, passed=passed, failed=len(ends) - passed, cases=ends)


def _end(policy: Policy, case: Case) -> CaseEnd:
    word = policy.rule_on(case.asked).word
    meets = word.says is case.expect or (case.expect is Says.ALLOW and word.says is Says.ALLOW_WITH_CONSTRAINTS)
    return CaseEnd(
        name=case.name,
        line=case.line,
        passed=meets and case.rule in (None, word.rule),
        expected=case.expect if case.rule is None else f"{case.expect} by {case.rule}",
        said=word.says,
        rule=word.rule,
        reason=word.reason,
    )


def read(text: str, source: str = "cases") -> list[Case]:
    return _CasesReader(source).document(tree(checked_size(text, source), source))


class _CasesReader(Reader):
    def document(self, node: Node | None) -> list[Case]:
        found = self.fields(node, "a file of cases", {"cases": self._cases})
        return found.get("cases") or []

    def _cases(self, node: Node) -> list[Case]:
        return [self._case(each) for each in self.items(node, "cases", CASES_MAX)]

    def _case(self, node: Node) -> Case:
        found = self.fields(
            node,
            "a case",
            {
                "name": self.word,
                "job": self._job,
                "submission": self._submission,
                "expect": lambda value: self.one_of(value, "expect", DECISIONS),
                "rule": self.word,
            },
        )
        if "expect" not in found or ("job" in found) == ("submission" in found):
            raise self.wrong(node, "a case needs expect, and either job or submission")
        asked = found.get("job") or found["submission"]
        name = found.get("name") or f"{asked.topic} of {asked.show}"
        return Case(name, node.line, asked, found["expect"], found.get("rule"))

    def _job(self, node: Node) -> Asked:
        given = self.fields(node, "a job", dict.fromkeys(FIELDS, self.plain))
        return self._converted(node, {"show": "default", "topic": "default", **given}, Asked)

    def _submission(self, node: Node) -> Asked:
        given = self._converted(node, self.plain(node), Submission)
        try:
            return asked_of(seen_of(plan(given, may_be_critical=True)))
        except InvalidInput as wrong:
            raise self.wrong(node, wrong.sentence) from None

    def _converted(self, node: Node, given: object, into: type[T]) -> T:
        try:
            return msgspec.convert(given, into)
        except msgspec.ValidationError as wrong:
            raise self.wrong(node, str(wrong).replace(" - at `$", " at `")) from None
