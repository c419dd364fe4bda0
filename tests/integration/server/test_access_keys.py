"""API keys in PostgreSQL: created, listed, found and revoked; each change is audited and no secret is stored."""

import asyncio
from datetime import UTC, datetime

import asyncpg
import pytest

from rota.accounting.admin import QuotaAdmin
from rota.infra import audit, failpoints
from rota.model.access import GrantSpec, Role
from rota.model.errors import InvalidInput, PostgresUnavailable, Unauthenticated
from rota.model.identity.api_key_format import ENTROPY_BYTES, new_key
from rota.server.access import ApiKeyStore, KeyCheck
from tests.contract.ledger_suite import sql
from tests.support.harness.lost_replies import lose_reply
from tests.support.waiting import until

AUDIT_ENTRIES = sql("SELECT actor, action, target, detail FROM rota.audit WHERE actor = $1 ORDER BY seq")
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


async def test_created_key_has_its_grants_and_is_accepted(keys):
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


async def test_list_orders_newest_first_and_hides_revoked_by_default(keys):
    made = [(await keys.create(name, VIEWER, actor="ann")).key for name in ("one", "two", "three")]
    assert [key.name for key in await keys.list()] == ["three", "two", "one"]
    await keys.revoke(made[1].id, actor="ann")
    await keys.database.run(EXPIRE, made[2].id)
    assert [(key.name, key.state) for key in await keys.list()] == [("three", "expired"), ("one", "active")]
    assert [key.state for key in await keys.list(revoked=True)] == ["expired", "revoked", "active"]


async def test_find_accepts_id_id_prefix_name_and_full_key(keys):
    made = await keys.create("ci", VIEWER, actor="ann")
    for text in (made.key.id, made.key.id[:4], "ci", made.plain.text):
        assert (await keys.find(text)).id == made.key.id
    other = await keys.create("ci", VIEWER, actor="ann", owner="ci")
    with pytest.raises(InvalidInput, match="2 keys match 'ci': use the id of one") as refused:
        await keys.find("ci")
    assert other.key.id in refused.value.sentence
    await keys.revoke(made.key.id, actor="ann")
    assert (await keys.find("ci")).id == other.key.id
    assert (await keys.find(made.key.id)).state == "revoked"


async def test_unknown_key_or_show_suggests_the_nearest_name_without_secret(keys):
    with pytest.raises(InvalidInput, match="There is no key 'x': there is none yet"):
        await keys.find("x")
    await keys.create("nightly", VIEWER, actor="ann")
    with pytest.raises(InvalidInput, match="There is no key 'nigtly': did you mean nightly"):
        await keys.find("nigtly")
    with pytest.raises(InvalidInput, match="There is no show 'flim': did you mean film"):
        await keys.create("ci", [GrantSpec(Role.VIEWER, "flim")], actor="ann")
    unknown = new_key(bytes(range(ENTROPY_BYTES)))
    with pytest.raises(InvalidInput) as refused:
        await keys.find(unknown.text)
    assert unknown.id in refused.value.sentence
    assert unknown.text.rpartition("_")[2][:8] not in refused.value.sentence
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
async def test_create_with_invalid_input_is_refused_and_changes_nothing(keys, name, specs, expires_s):
    with pytest.raises(InvalidInput) as refused:
        await keys.create(name, specs, actor="bad", expires_s=expires_s)
    assert refused.value.sentence.count("\n") == 0
    assert await keys.list(revoked=True) == []
    assert await keys.database.rows(AUDIT_ENTRIES, "bad") == []


async def test_key_changes_are_audited_and_repeated_revoke_is_a_no_op(keys):
    made = await keys.create("ci", [GrantSpec(Role.OPERATOR, "film")], actor="auditee")
    revoked, changed = await keys.revoke(made.key.id, actor="auditee")
    assert (revoked.state, changed) == ("revoked", True)
    again, changed = await keys.revoke(made.key.id, actor="auditee")
    assert (again, changed) == (revoked, False)
    rows = await keys.database.rows(AUDIT_ENTRIES, "auditee")
    assert [(row["action"], row["target"]) for row in rows] == [
        ("key.create", f"key:{made.key.id}"),
        ("key.revoke", f"key:{made.key.id}"),
    ]
    assert '"operator in film"' in rows[0]["detail"]
    assert (await audit.verify(keys.database)).ok


async def test_crash_between_revocation_and_audit_entry_rolls_back_both(keys, monkeypatch):
    made = await keys.create("ci", VIEWER, actor="ann")

    def crash(place):
        assert place == "access.after_revoke_before_audit"
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(failpoints, "hit", crash)
        with pytest.raises(KeyboardInterrupt):
            await keys.revoke(made.key.id, actor="mortal")
    assert (await keys.find("ci")).state == "active"
    assert await keys.database.rows(AUDIT_ENTRIES, "mortal") == []


async def test_concurrent_revocations_take_effect_once(keys):
    made = await keys.create("ci", VIEWER, actor="ann")
    done = await asyncio.gather(*(keys.revoke(made.key.id, actor="both") for _ in range(2)))
    assert sorted(changed for _, changed in done) == [False, True]
    assert {key.state for key, _ in done} == {"revoked"}
    assert len(await keys.database.rows(AUDIT_ENTRIES, "both")) == 1


async def test_key_secret_is_never_stored_or_displayed(keys):
    made = await keys.create("ci", [GrantSpec(Role.OPERATOR, "film")], actor="ann")
    await keys.revoke(made.key.id, actor="ann")
    secret = made.plain.text.rpartition("_")[2]
    stored = await keys.database.value(EVERYTHING)
    assert made.key.id in stored
    assert secret not in stored
    assert secret not in repr(made) + str(made) + repr(await keys.list(revoked=True))


async def test_grant_follows_renamed_show_and_not_a_new_show_of_the_old_name(keys):
    admin, key_check = QuotaAdmin(keys.database), KeyCheck(keys.database)
    made = await keys.create("ci", [GrantSpec(Role.ADMIN, "film")], actor="ann")
    await admin.rename_show("film", "feature", actor="ann")
    actor = await key_check.check(made.plain.text)
    assert (actor.has_role(Role.ADMIN, "feature"), actor.has_role(Role.VIEWER, "film")) == (True, False)
    await admin.create_show("film", actor="ann")
    key_check.invalidate()
    assert not (await key_check.check(made.plain.text)).has_role(Role.VIEWER, "film")


async def test_deleted_show_removes_its_grants_without_widening_the_rest(keys):
    admin, key_check = QuotaAdmin(keys.database), KeyCheck(keys.database)
    one = await keys.create("one", [GrantSpec(Role.ADMIN, "film")], actor="ann")
    both = await keys.create("both", [GrantSpec(Role.ADMIN, "film"), GrantSpec(Role.VIEWER, "short")], actor="ann")
    await admin.delete_show("film", actor="ann")
    assert (await key_check.check(one.plain.text)).grants == ()
    actor = await key_check.check(both.plain.text)
    assert [str(grant) for grant in actor.grants] == ["viewer in short"]
    assert not actor.has_role(Role.VIEWER)
    await admin.create_show("film", actor="ann")
    key_check.invalidate()
    assert not (await key_check.check(one.plain.text)).has_role(Role.VIEWER, "film")


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE rota.api_grant SET pk_show = NULL",
        "UPDATE rota.api_grant SET b_every = true",
        "UPDATE rota.api_grant SET role = 'root'",
        "UPDATE rota.api_key SET digest = 'x'",
    ],
)
async def test_tables_reject_updates_that_widen_a_grant(keys, statement):
    await keys.create("ci", [GrantSpec(Role.ADMIN, "film")], actor="ann")
    with pytest.raises(asyncpg.CheckViolationError):
        await keys.database.run(sql(statement))


async def test_show_deleted_during_key_creation_fails_it_without_a_key(keys):
    admin = QuotaAdmin(keys.database)
    async with keys.database.transaction() as tx:
        await tx.run(sql("DELETE FROM rota.show WHERE str_name = 'film'"))
        creating = asyncio.create_task(keys.create("ci", [GrantSpec(Role.ADMIN, "film")], actor="ann"))
        await until(lambda: keys.database.value(WAITING), what="the grant waiting for the show's row lock")
    with pytest.raises(InvalidInput, match="just deleted"):
        await creating
    assert await keys.list(revoked=True) == []
    assert [show.name for show in await admin.shows()] == ["short"]


async def test_key_with_lost_commit_reply_is_listed_and_can_be_revoked(keys, monkeypatch):
    lose_reply(monkeypatch, "postgres.commit")
    with pytest.raises(PostgresUnavailable) as lost:
        await keys.create("ci", ADMIN, actor="ann")
    assert lost.value.facts["outcome"] == "unknown"
    [key] = await keys.list()
    assert (key.name, key.last_used_at) == ("ci", None)
    assert (await keys.revoke(key.id, actor="ann"))[1]


async def test_add_of_existing_key_is_idempotent(keys):
    plain = new_key(bytes(range(ENTROPY_BYTES)))
    with pytest.raises(Unauthenticated):
        await KeyCheck(keys.database).check(plain.text)
    assert (await keys.add(plain, "local", ADMIN, actor="up")).state == "active"
    assert await keys.add(plain, "local", ADMIN, actor="up") is None
    assert (await KeyCheck(keys.database).check(plain.text)).has_role(Role.ADMIN)
    assert len(await keys.database.rows(AUDIT_ENTRIES, "up")) == 1
    assert (await keys.list())[0].created_at <= datetime.now(UTC)
