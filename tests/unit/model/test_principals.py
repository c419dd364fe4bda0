"""Names of principals, claims of submitters without a key, and who may vote on whose work."""

from datetime import UTC, datetime
from itertools import product
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rota.model.approvals import Approval, ApprovalState, Vote, Voter, check_voter
from rota.model.errors import Forbidden, InvalidInput, SelfApprovalDenied
from rota.model.identity.principals import (
    Principal,
    is_unverified,
    parse_kind,
    unverified_name,
    validate_principal_name,
)
from rota.model.ids import ShowId
from rota.model.jobs.submission import LayerSpec, Submission, decode_details
from rota.model.jobs.validation import validate_submission, validate_unverified
from rota.model.policy.decision import ApprovalTerms

NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", fullmatch=True).filter(lambda name: name[:5] != "rota_")
FACES = st.sampled_from(["cli", "bus", "sql"])
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def approval(principal="", actor="", approvers=(), votes=()):
    return Approval(
        id=UUID(int=1), kind="job", subject="x", show="film", show_id=ShowId(UUID(int=2)), state=ApprovalState.PENDING,
        hash=b"", title="", reason="", rule="r", snapshot="", quorum=1, approvers=approvers, principal=principal,
        actor=actor, requested_at=NOW, votes=votes,
    )  # fmt: skip


def voter(principal, *, is_operator=True):
    return Voter(principal, f"key:{principal.name}:x", is_operator)


@given(face=FACES, claimed=st.one_of(NAMES, st.text(max_size=600)), name=NAMES)
def test_claim_of_a_submitter_without_a_key_equals_no_principal(face, claimed, name):
    claim = unverified_name(face, claimed)
    assert is_unverified(claim)
    assert not is_unverified(validate_principal_name(name))
    with pytest.raises(InvalidInput):
        validate_principal_name(claim)
    assert len(claim) <= 500


@given(face=FACES, name=NAMES, by=NAMES, agrees=st.booleans(), approvers=st.lists(NAMES, max_size=2))
def test_nobody_approves_what_no_key_submitted(face, name, by, agrees, approvers):
    asked = approval(unverified_name(face, name), approvers=(*approvers, by) if approvers else ())
    if agrees:
        with pytest.raises(SelfApprovalDenied, match="without a key"):
            check_voter(asked, voter(Principal(by)), agrees=True)
    else:
        check_voter(asked, voter(Principal(by)), agrees=False)


@given(face=FACES, name=NAMES, submitter=st.one_of(st.just(""), NAMES), agrees=st.booleans())
def test_voter_without_a_key_never_counts(face, name, submitter, agrees):
    with pytest.raises(Forbidden, match="is not a principal"):
        check_voter(approval(submitter), voter(Principal(unverified_name(face, name))), agrees=agrees)


@pytest.mark.parametrize(
    ("is_own", "is_named", "is_global", "is_operator", "agrees"), list(product((False, True), repeat=5))
)
def test_voter_must_be_another_and_be_named_or_an_operator(is_own, is_named, is_global, is_operator, agrees):
    asked = approval("ann" if is_own else "sam", approvers=("ann", "bob") if is_named else ())
    who = voter(Principal("ann", is_global), is_operator=is_operator)
    if is_own:
        with pytest.raises(SelfApprovalDenied):
            check_voter(asked, who, agrees=agrees)
    elif is_global if is_named else is_operator:
        check_voter(asked, who, agrees=agrees)
    else:
        with pytest.raises(Forbidden):
            check_voter(asked, who, agrees=agrees)


def test_shared_former_name_excludes_and_gives_no_right():
    former = Principal("ceo-0123456789", is_global=False, shared_name="ceo")
    for asked in (approval("ceo"), approval(actor="ceo")):
        with pytest.raises(SelfApprovalDenied):
            check_voter(asked, voter(former), agrees=True)
    with pytest.raises(Forbidden, match="ask one of ceo"):
        check_voter(approval("sam", approvers=("ceo",)), voter(former), agrees=True)
    vote = Vote("ceo", True, "", NOW)
    assert approval("sam", votes=(vote,)).vote_of(voter(former)) is vote
    assert approval("sam", votes=(vote,)).vote_of(voter(Principal("ceo-9876543210"))) is None


def test_vote_of_a_local_principal_does_not_meet_terms_that_name_it():
    votes = (Vote("ceo", True, "", NOW, may_be_named=False), Vote("ann", True, "", NOW))
    one = replace(approval("sam", votes=votes), state=ApprovalState.GRANTED)
    assert one.meets("r", ApprovalTerms(quorum=2))
    assert not one.meets("r", ApprovalTerms(approvers=("ceo",)))
    assert one.meets("r", ApprovalTerms(approvers=("ceo", "ann")))


def test_claim_changes_the_principal_of_a_submission_and_not_its_digest():
    sent = Submission(show="film", layers=(LayerSpec(task="noop"),), principal="ann", idempotency_key="k")
    plan = validate_unverified(sent, "bus")
    assert decode_details(plan.details).principal == "bus:ann"
    assert plan.digest == validate_submission(sent).digest
    long = validate_unverified(Submission(show="film", layers=(LayerSpec(task="noop"),), principal="a" * 500), "sql")
    assert decode_details(long.details).principal == f"sql:{'a' * 496}"


def test_unknown_kind_is_refused():
    assert parse_kind("PERSON").value == "person"
    with pytest.raises(InvalidInput, match="use person or service"):
        parse_kind("robot")
