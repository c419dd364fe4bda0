"""Keys in PostgreSQL: made, listed, found and revoked, each change audited, and no secret anywhere."""

import asyncio
from datetime import UTC, datetime

import asyncpg
import pytest

from rota.accounting.admin import QuotaAdmin
from rota.infra import audit, failpoints
from rota.model.access import GrantSpec, Role
from rota.model.api_key_format import ENTROPY_BYTES, new_key
from rota.model.errors import InvalidInput, PostgresUnavailable, Unauthenticated
from rota.server.access import ApiKeyStore, KeyCheck
from tests.contract.ledger_suite import sql
from tests.support.waiting import until

TRAIL = sql("SELECT actor, action, target, detail FROM rota.audit WHERE actor = $1 ORDER BY seq")
EVERYTHING = sql("""
SELECT (SELECT string_agg(k::text, ' ') FROM rota.api_key k) || (SELECT string_agg(g::text, ' ') FROM rota.api_grant g)
    || (SELECT string_agg(a::text, ' ') FROM rota.audit a)""")
EXPIRE = sql("UPDATE rota.api_key SET ts_expires = now() - interval '1 second' WHERE id = $1")
WAITING = sql("""
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0""")
VIEWER, ADMIN = [GrantSpec(Role.VIEWER)], [GrantSpec(Role.ADMIN)]


@pytest.fixture
async def keys(database):
    for name in ("film", "short"):
        await QuotaAdmin(database).create_show(name, actor="setup")
    return ApiKeyStore(database)


def grants(key):
    return [str(grant) for grant in key.grants]


async def test_a_key_is_made_with_its_grants_and_opens(keys):
    specs = [GrantSpec(Role.SUBMITTER, "film"), GrantSpec(Role.VIEWER, "short")]
    made = await keys.create("ci", specs, actor="ann", expires_s=3600)
    assert (made.key.name, grants(made.key), made.key.state) == (
        "ci",
        ["submitter in film", "viewer in short"],
        "active",
    )
    assert (made.key.expires_at - made.key.created_at).total_seconds() == 3600
    assert made.key.last_used_at is made.key.revoked_at is None
    actor = await KeyCheck(keys.database).check(made.plain.text)
    assert (actor.key, actor.name, actor.grants) == (made.key.id, "ci", made.key.grants)
    shows = {show.name: show.id for show in await QuotaAdmin(keys.database).shows()}
    assert actor.shows_with_role(Role.VIEWER) == {shows["film"], shows["short"]}


async def test_the_newest_is_listed_first_and_revoked_ones_on_demand(keys):
    made = [(await keys.create(name, VIEWER, actor="ann")).key for name in ("one", "two", "three")]
    assert [key.name for key in await keys.list()] == ["three", "two", "one"]
    await keys.revoke(made[1].id, actor="ann")
    await keys.database.run(EXPIRE, made[2].id)
    assert [(key.name, key.state) for key in await keys.list()] == [("three", "expired"), ("one", "active")]
    assert [key.state for key in await keys.list(revoked=True)] == ["expired", "revoked", "active"]


async def test_a_key_is_found_by_id_its_beginning_and_its_name(keys):
    made = await keys.create("ci", VIEWER, actor="ann")
    for text in (made.key.id, made.key.id[:4], "ci", made.plain.text):
        assert (await keys.find(text)).id == made.key.id
    other = await keys.create("ci", VIEWER, actor="ann")
    with pytest.raises(InvalidInput, match="2 keys match 'ci': use the id of one") as refused:
        await keys.find("ci")
    assert other.key.id in refused.value.sentence
    await keys.revoke(made.key.id, actor="ann")
    assert (await keys.find("ci")).id == other.key.id
    assert (await keys.find(made.key.id)).state == "revoked"


async def test_what_is_not_there_is_told_with_the_nearest_and_without_a_secret(keys):
    with pytest.raises(InvalidInput, match="There is no key 'x': there is none yet"):
        await keys.find("x")
    await keys.create("nightly", VIEWER, actor="ann")
    with pytest.raises(InvalidInput, match="There is no key 'nigtly': did you mean nightly"):
        await keys.find("nigtly")
    with pytest.raises(InvalidInput, match="There is no show 'flim': did you mean film"):
        await keys.create("ci", [GrantSpec(Role.VIEWER, "flim")], actor="ann")
    stranger = new_key(bytes(range(ENTROPY_BYTES)))
    with pytest.raises(InvalidInput) as refused:
        await keys.find(stranger.text)
    assert stranger.id in refused.value.sentence
    assert stranger.text.rpartition("_")[2][:8] not in refused.value.sentence
    with pytest.raises(InvalidInput, match="There is no key 'zzzz'"):
        await keys.revoke("zzzz", actor="ann")


@pytest.mark.parametrize(
    ("name", "specs", "expires_s"),
    [
        ("a b", VIEWER, None),
        ("ci", [], None),
        ("ci", [GrantSpec(Role.VIEWER, "film"), GrantSpec(Role.ADMIN, "film")], None),
        ("ci", [GrantSpec(Role.VIEWER, "")], None),
        ("ci", [GrantSpec(Role.VIEWER, "nowhere\x00")], None),
        ("ci", VIEWER, 0.0),
        ("ci", VIEWER, float("nan")),
    ],
)
async def test_bad_input_is_one_sentence_and_changes_nothing(keys, name, specs, expires_s):
    with pytest.raises(InvalidInput) as refused:
        await keys.create(name, specs, actor="bad", expires_s=expires_s)
    assert refused.value.sentence.count("\n") == 0
    assert await keys.list(revoked=True) == []
    assert await keys.database.rows(TRAIL, "bad") == []


async def test_every_change_is_in_the_audit_trail_and_a_repeated_revoke_is_none(keys):
    made = await keys.create("ci", [GrantSpec(Role.OPERATOR, "film")], actor="auditee")
    revoked, changed = await keys.revoke(made.key.id, actor="auditee")
    assert (revoked.state, changed) == ("revoked", True)
    again, changed = await keys.revoke(made.key.id, actor="auditee")
    assert (again, changed) == (revoked, False)
    rows = await keys.database.rows(TRAIL, "auditee")
    assert [(row["action"], row["target"]) for row in rows] == [
        ("key.create", f"key:{made.key.id}"),
        ("key.revoke", f"key:{made.key.id}"),
    ]
    assert '"operator in film"' in rows[0]["detail"]
    assert (await audit.verify(keys.database)).ok


async def test_who_dies_between_a_revocation_and_its_audit_entry_has_done_neither(keys, monkeypatch):
    made = await keys.create("ci", VIEWER, actor="ann")

    def die(place):
        assert place == "access.after_revoke_before_audit"
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(failpoints, "hit", die)
        with pytest.raises(KeyboardInterrupt):
            await keys.revoke(made.key.id, actor="mortal")
    assert (await keys.find("ci")).state == "active"
    assert await keys.database.rows(TRAIL, "mortal") == []


async def test_of_two_who_revoke_at_once_one_did_it(keys):
    made = await keys.create("ci", VIEWER, actor="ann")
    done = await asyncio.gather(*(keys.revoke(made.key.id, actor="both") for _ in range(2)))
    assert sorted(changed for _, changed in done) == [False, True]
    assert {key.state for key, _ in done} == {"revoked"}
    assert len(await keys.database.rows(TRAIL, "both")) == 1


async def test_no_secret_is_stored_or_shown(keys):
    made = await keys.create("ci", [GrantSpec(Role.OPERATOR, "film")], actor="ann")
    await keys.revoke(made.key.id, actor="ann")
    secret = made.plain.text.rpartition("_")[2]
    held = await keys.database.value(EVERYTHING)
    assert made.key.id in held
    assert secret not in held
    assert secret not in repr(made) + str(made) + repr(await keys.list(revoked=True))


async def test_a_renamed_show_keeps_its_grants_and_one_made_anew_has_none(keys):
    admin, checking = QuotaAdmin(keys.database), KeyCheck(keys.database)
    made = await keys.create("ci", [GrantSpec(Role.ADMIN, "film")], actor="ann")
    await admin.rename_show("film", "feature", actor="ann")
    actor = await checking.check(made.plain.text)
    assert (actor.has_role(Role.ADMIN, "feature"), actor.has_role(Role.VIEWER, "film")) == (True, False)
    await admin.create_show("film", actor="ann")
    checking.invalidate()
    assert not (await checking.check(made.plain.text)).has_role(Role.VIEWER, "film")


async def test_a_deleted_show_takes_its_grants_along_and_what_is_left_may_not_more(keys):
    admin, checking = QuotaAdmin(keys.database), KeyCheck(keys.database)
    one = await keys.create("one", [GrantSpec(Role.ADMIN, "film")], actor="ann")
    both = await keys.create("both", [GrantSpec(Role.ADMIN, "film"), GrantSpec(Role.VIEWER, "short")], actor="ann")
    await admin.delete_show("film", actor="ann")
    assert (await checking.check(one.plain.text)).grants == ()
    actor = await checking.check(both.plain.text)
    assert [str(grant) for grant in actor.grants] == ["viewer in short"]
    assert not actor.has_role(Role.VIEWER)
    await admin.create_show("film", actor="ann")
    checking.invalidate()
    assert not (await checking.check(one.plain.text)).has_role(Role.VIEWER, "film")


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE rota.api_grant SET pk_show = NULL",
        "UPDATE rota.api_grant SET b_every = true",
        "UPDATE rota.api_grant SET role = 'root'",
        "UPDATE rota.api_key SET digest = 'x'",
    ],
)
async def test_tables_refuse_what_would_make_a_grant_wider_than_it_was_meant(keys, statement):
    await keys.create("ci", [GrantSpec(Role.ADMIN, "film")], actor="ann")
    with pytest.raises(asyncpg.CheckViolationError):
        await keys.database.run(sql(statement))


async def test_a_show_that_is_deleted_meanwhile_is_told_and_leaves_no_key(keys):
    admin = QuotaAdmin(keys.database)
    async with keys.database.transaction() as tx:
        await tx.run(sql("DELETE FROM rota.show WHERE str_name = 'film'"))
        making = asyncio.create_task(keys.create("ci", [GrantSpec(Role.ADMIN, "film")], actor="ann"))
        await until(lambda: keys.database.value(WAITING), what="the key's grant to wait for the show")
    with pytest.raises(InvalidInput, match="just deleted"):
        await making
    assert await keys.list(revoked=True) == []
    assert [show.name for show in await admin.shows()] == ["short"]


async def test_a_key_whose_reply_was_lost_is_listed_and_can_be_revoked(keys, monkeypatch):
    plan = failpoints.FaultPlan.parse({"LOST_REPLY_AT": "postgres.commit"})
    monkeypatch.setattr(failpoints, "after_send", plan.after_send)
    with pytest.raises(PostgresUnavailable) as lost:
        await keys.create("ci", ADMIN, actor="ann")
    assert lost.value.facts["outcome"] == "unknown"
    [key] = await keys.list()
    assert (key.name, key.last_used_at) == ("ci", None)
    assert (await keys.revoke(key.id, actor="ann"))[1]


async def test_a_key_that_somebody_has_is_taken_in_once(keys):
    plain = new_key(bytes(range(ENTROPY_BYTES)))
    with pytest.raises(Unauthenticated):
        await KeyCheck(keys.database).check(plain.text)
    assert (await keys.add(plain, "local", ADMIN, actor="up")).state == "active"
    assert await keys.add(plain, "local", ADMIN, actor="up") is None
    assert (await KeyCheck(keys.database).check(plain.text)).has_role(Role.ADMIN)
    assert len(await keys.database.rows(TRAIL, "up")) == 1
    assert (await keys.list())[0].created_at <= datetime.now(UTC)
