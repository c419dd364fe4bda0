"""Redacting any value: what was found is nowhere in what is left, and everything else is as it was."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from rota.model.policy.outputs import REDACTION_MARKER, OutputEffect, OutputMeta
from rota.policy.output.evaluate import CompiledOutputPolicy, OutputContent, deadline_after
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
def test_nothing_that_was_found_is_left(value):
    data = msgspec.msgpack.encode(value)
    said = POLICY.check_content(META, OutputContent(data), deadline_after(20))
    left = data if said.redacted is None else said.redacted.value
    assert SECRET.encode() not in left
    assert MAIL.encode() not in left
    assert POLICY.check_content(META, OutputContent(left), deadline_after(20)).word.says is OutputEffect.ALLOW
    if said.word.says is OutputEffect.ALLOW:
        assert SECRET.encode() not in data
    assert SECRET not in repr(said.word)
    assert MAIL not in repr(said.word)


@given(st.lists(texts, max_size=6))
def test_offsets_name_what_was_found(listed):
    keeps = OutputRule(id="k", decision=OutputEffect.QUARANTINE, match=OutputMatch(scanners=("secret",)))
    said = CompiledOutputPolicy(OutputRules(rules=(keeps,))).check_content(
        META, OutputContent(msgspec.msgpack.encode(listed)), deadline_after(20)
    )
    for finding in said.word.findings:
        number = int(finding.where.removeprefix("value[").removesuffix("]"))
        assert listed[number][finding.offset : finding.offset + finding.length] == SECRET


@given(st.lists(st.tuples(plain, plain), min_size=1, max_size=4))
def test_what_is_around_a_finding_stays(parts):
    listed = [f"{before} {SECRET} {after}" for before, after in parts]
    said = POLICY.check_content(META, OutputContent(msgspec.msgpack.encode(listed)), deadline_after(20))
    left = msgspec.msgpack.decode(said.redacted.value)
    for (before, after), text in zip(parts, left, strict=True):
        if "@" not in before + after and not any(mark.isdigit() for mark in before + after):
            assert text == f"{before} {REDACTION_MARKER} {after}"
