"""Permissions: every role in every kind of show, and the errors of refused callers."""

from itertools import product
from uuid import UUID

import msgspec
import pytest

from rota.model.access import (
    GRANTS_MAX,
    Actor,
    Grant,
    GrantSpec,
    Role,
    ShowRef,
    parse_role,
    require_grant_role,
    require_key_owner,
    require_role,
    require_role_in_any_show,
    require_submit_role,
    role_required_to_submit,
    validate_expiry,
    validate_grants,
    validate_key_name,
)
from rota.model.errors import Forbidden, InvalidInput
from rota.model.identity.api_key_format import KeyId
from rota.model.identity.principals import Principal
from rota.model.jobs.submission import Submission

FILM, SHORT = (ShowRef(UUID(int=number), name) for number, name in ((1, "film"), (2, "short")))
EVERY_SHOW = None


def actor(*grants):
    return Actor(KeyId("0123456789"), "laptop", Principal("ci"), tuple(Grant(role, show) for role, show in grants))


def test_roles_are_ordered_from_viewer_to_admin():
    assert sorted(Role, reverse=True) == [Role.ADMIN, Role.OPERATOR, Role.SUBMITTER, Role.VIEWER]
    assert max(Role.VIEWER, Role.OPERATOR, Role.SUBMITTER) is Role.OPERATOR


@pytest.mark.parametrize(("has", "needs"), list(product(Role, Role)))
def test_role_in_a_show_includes_lower_roles_there_and_nothing_elsewhere(has, needs):
    one, all_ = actor((has, FILM)), actor((has, EVERY_SHOW))
    enough = list(Role).index(has) >= list(Role).index(needs)
    for show in ("film", FILM.id):
        assert one.has_role(needs, show) is enough
    for show in ("short", SHORT.id, "Film", "", str(FILM.id), None):
        assert not one.has_role(needs, show)
    for show in ("film", SHORT.id, None):
        assert all_.has_role(needs, show) is enough
    assert one.has_role_in_any_show(needs) is all_.has_role_in_any_show(needs) is enough


def test_higher_of_two_grants_applies():
    both = actor((Role.VIEWER, EVERY_SHOW), (Role.OPERATOR, FILM))
    assert (both.role("film"), both.role("short"), both.role()) == (Role.OPERATOR, Role.VIEWER, Role.VIEWER)


def test_key_without_grants_has_no_role():
    ungranted = actor()
    assert not [
        role
        for role in Role
        if ungranted.has_role(role) or ungranted.has_role(role, "film") or ungranted.has_role_in_any_show(role)
    ]
    assert ungranted.shows_with_role(Role.VIEWER) == frozenset()


def test_listings_are_limited_to_the_visible_shows():
    both = actor((Role.VIEWER, SHORT), (Role.OPERATOR, FILM))
    assert both.shows_with_role(Role.VIEWER) == {FILM.id, SHORT.id}
    assert both.shows_with_role(Role.OPERATOR) == {FILM.id}
    assert both.shows_with_role(Role.ADMIN) == frozenset()
    assert actor((Role.OPERATOR, EVERY_SHOW)).shows_with_role(Role.VIEWER) is None


def test_keys_of_a_principal_are_added_by_itself_and_by_admins_of_every_show():
    require_key_owner(actor((Role.ADMIN, FILM)), "ci")
    require_key_owner(actor((Role.ADMIN, None)), "ann")
    for who in (actor((Role.ADMIN, FILM)), actor((Role.OPERATOR, None)), actor()):
        for principal in ("ann", "laptop", "CI", ""):
            with pytest.raises(Forbidden, match="can add a key for the principal"):
                require_key_owner(who, principal)


def test_forbidden_error_names_the_current_and_the_required_role():
    with pytest.raises(Forbidden) as refused:
        require_role(actor((Role.VIEWER, FILM)), Role.OPERATOR, "film")
    assert refused.value.sentence == (
        "The key laptop has the role viewer in show film, but this requires operator: use another key, or create one"
        " with `rota keys create NAME --role operator --show film`."
    )
    assert (refused.value.code, refused.value.facts) == ("forbidden", {"needs": "operator", "has": "viewer"})
    with pytest.raises(Forbidden, match="has no role that applies to every show, but this requires viewer"):
        require_role(actor((Role.ADMIN, FILM)), Role.VIEWER)
    with pytest.raises(Forbidden, match="has no role in this show"):
        require_role(actor((Role.ADMIN, FILM)), Role.VIEWER, SHORT.id)
    with pytest.raises(Forbidden, match="does not have the role submitter in any show"):
        require_role_in_any_show(actor((Role.VIEWER, FILM)), Role.SUBMITTER)
    require_role_in_any_show(actor((Role.VIEWER, FILM)), Role.VIEWER)


def test_unknown_show_is_refused_like_a_show_of_another_tenant():
    sentences = []
    for name in ("short", "nowhere"):
        with pytest.raises(Forbidden) as refused:
            require_role(actor((Role.ADMIN, FILM)), Role.VIEWER, name)
        sentences.append(refused.value.sentence.replace(name, "NAME"))
    assert sentences[0] == sentences[1]


@pytest.mark.parametrize("priority", [9, "CRITICAL", "critical", 10])
def test_critical_priority_requires_operator(priority):
    submission = Submission(show="film", layers=(), priority=priority)
    require_submit_role(actor((Role.OPERATOR, FILM)), submission)
    with pytest.raises(Forbidden, match="this requires operator"):
        require_submit_role(actor((Role.SUBMITTER, FILM)), submission)
    with pytest.raises(Forbidden):
        require_submit_role(actor((Role.OPERATOR, SHORT)), submission)


@pytest.mark.parametrize("priority", [1, 8, "BATCH", "interactive", "no such word", 0])
def test_other_priorities_require_submitter(priority):
    submission = Submission(show="film", layers=(), priority=priority)
    assert role_required_to_submit(priority) is Role.SUBMITTER
    require_submit_role(actor((Role.SUBMITTER, FILM)), submission)
    with pytest.raises(Forbidden, match="this requires submitter"):
        require_submit_role(actor((Role.VIEWER, FILM)), submission)


def test_grants_of_a_new_key_require_admin_in_every_named_show():
    admin = actor((Role.ADMIN, FILM), (Role.OPERATOR, SHORT))
    require_grant_role(admin, ["film"])
    for shows in ([None], ["short"], ["film", "short"], ["film", None]):
        with pytest.raises(Forbidden):
            require_grant_role(admin, shows)
    require_grant_role(actor((Role.ADMIN, EVERY_SHOW)), ["film", "short", None])


def test_audited_actor_has_key_name_and_id():
    assert actor().audited == "key:ci:0123456789"


def test_grant_has_text_and_json_forms():
    grant = Grant(Role.VIEWER, FILM)
    assert (str(grant), str(Grant(Role.ADMIN))) == ("viewer in film", "admin in every show")
    assert msgspec.json.decode(msgspec.json.encode(grant), type=Grant) == grant
    assert b'"viewer"' in msgspec.json.encode(grant)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("operater", "'operater' is not a known role: did you mean operator?"),
        ("sub", "'sub' is not a known role: did you mean submitter?"),
        ("root", "'root' is not a known role: use viewer, submitter, operator or admin."),
        ("", "'' is not a known role: use viewer, submitter, operator or admin."),
    ],
)
def test_unknown_role_is_refused_with_the_nearest_one(text, sentence):
    with pytest.raises(InvalidInput) as refused:
        parse_role(text)
    assert refused.value.sentence == sentence
    assert parse_role("Admin") is Role.ADMIN


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "-x", "naïve", "a\n", "rota_0123456789_abc"])
def test_invalid_key_name_is_refused_in_one_line(name):
    with pytest.raises(InvalidInput) as refused:
        validate_key_name(name)
    assert refused.value.sentence.count("\n") == 0
    assert "0123456789" not in refused.value.sentence


@pytest.mark.parametrize("seconds", [0.0, -1.0, 0.5, 1e12, float("inf"), float("nan")])
def test_invalid_expiry_is_refused(seconds):
    with pytest.raises(InvalidInput, match="use 1s to 3650d"):
        validate_expiry(seconds)
    assert (validate_expiry(None), validate_expiry(1.0)) == (None, 1.0)


def test_key_needs_grants_with_each_show_once():
    for wrong in ([], [GrantSpec(Role.VIEWER, f"s{n}") for n in range(GRANTS_MAX + 1)]):
        with pytest.raises(InvalidInput, match=f"must have 1 to {GRANTS_MAX} grants"):
            validate_grants(wrong)
    for twice in ("film", None):
        with pytest.raises(InvalidInput, match="name every show once"):
            validate_grants([GrantSpec(Role.VIEWER, twice), GrantSpec(Role.ADMIN, twice)])
