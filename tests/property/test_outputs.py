"""Redaction of any value removes every finding and keeps everything else."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from rota.model.policy.outputs import REDACTION_MARKER, OutputEffect, OutputMeta
from rota.policy.output.evaluate import CompiledOutputPolicy, deadline_after
from rota.policy.output.parts import OutputContent
from rota.policy.output.rules import OutputMatch, OutputRule, OutputRules

SECRET = "AKIA" + "ABCDEFGHIJKLMNOP"
MAIL = "ann@example.org"
META = OutputMeta(show="film", topic="t")
POLICY = CompiledOutputPolicy(
    OutputRules(
        rules=(
            OutputRule(
                id="r",
                decision=OutputEffect.REDACT,
                match=OutputMatch(scanners=("secret",), content_patterns=()),
            ),
            OutputRule(id="m", decision=OutputEffect.REDACT, match=OutputMatch(scanners=("pii",))),
        )
    )
)

plain = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
planted = st.builds(
    lambda before, what, after: f"{before} {what} {after}", plain, st.sampled_from([SECRET, MAIL]), plain
)
texts = st.one_of(plain, planted)
leaves = st.one_of(
    texts, st.integers(-(2**40), 2**40), st.booleans(), st.none(), st.binary(max_size=20), texts.map(str.encode)
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=12,
)


@given(values)
def test_redacted_value_contains_no_finding(value):
    data = msgspec.msgpack.encode(value)
    result = POLICY.check_content(META, OutputContent(data), deadline_after(20))
    left = data if result.redacted is None else result.redacted.value
    assert SECRET.encode() not in left
    assert MAIL.encode() not in left
    assert POLICY.check_content(META, OutputContent(left), deadline_after(20)).word.says is OutputEffect.ALLOW
    if result.word.says is OutputEffect.ALLOW:
        assert SECRET.encode() not in data
    assert SECRET not in repr(result.word)
    assert MAIL not in repr(result.word)


@given(st.lists(texts, max_size=6))
def test_finding_offsets_locate_the_secret(listed):
    keeps = OutputRule(id="k", decision=OutputEffect.QUARANTINE, match=OutputMatch(scanners=("secret",)))
    result = CompiledOutputPolicy(OutputRules(rules=(keeps,))).check_content(
        META, OutputContent(msgspec.msgpack.encode(listed)), deadline_after(20)
    )
    for finding in result.word.findings:
        number = int(finding.where.removeprefix("value[").removesuffix("]"))
        assert listed[number][finding.offset : finding.offset + finding.length] == SECRET


@given(st.lists(st.tuples(plain, plain), min_size=1, max_size=4))
def test_text_around_a_finding_is_kept(parts):
    listed = [f"{before} {SECRET} {after}" for before, after in parts]
    result = POLICY.check_content(META, OutputContent(msgspec.msgpack.encode(listed)), deadline_after(20))
    left = msgspec.msgpack.decode(result.redacted.value)
    for (before, after), text in zip(parts, left, strict=True):
        if "@" not in before + after and not any(char.isdigit() for char in before + after):
            assert text == f"{before} {REDACTION_MARKER} {after}"
