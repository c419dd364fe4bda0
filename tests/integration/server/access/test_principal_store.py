"""Principals in PostgreSQL: names are taken for good, and disabling is ordered against what a principal does."""

import asyncio

import asyncpg
import pytest

from rota.infra import failpoints
from rota.model.access import GrantSpec, Role
from rota.model.errors import NameTaken, NotFound, PrincipalDisabled, RotaError
from rota.model.identity.principals import PrincipalKind
from rota.server.access import ApiKeyStore, PrincipalStore
from tests.support.queue import sql
from tests.support.waiting import until

VIEWER = [GrantSpec(Role.VIEWER)]
WAITING = sql("""
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0""")
AUDITED = sql("SELECT action, target FROM rota.audit WHERE actor = $1 ORDER BY seq")


@pytest.fixture
def principals(database):
    return PrincipalStore(database)


@pytest.fixture
def keys(database):
    return ApiKeyStore(database)


async def test_changes_are_audited_and_repeated_disabling_is_a_no_op(principals):
    await principals.create("ann", PrincipalKind.PERSON, actor="auditee")
    disabled, changed = await principals.disable("ann", actor="auditee")
    assert (disabled.disabled_at is not None, changed) == (True, True)
    assert await principals.disable("ann", actor="auditee") == (disabled, False)
    rows = await principals.database.rows(AUDITED, "auditee")
    assert [tuple(row) for row in rows] == [
        ("principal.create", "principal:ann"),
        ("principal.disable", "principal:ann"),
    ]
    with pytest.raises(NotFound, match="There is no principal 'bob'"):
        await principals.disable("bob", actor="auditee")


async def test_crash_between_disabling_and_audit_entry_rolls_back_both(principals, monkeypatch):
    await principals.create("ann", PrincipalKind.PERSON, actor="x")

    def crash(place):
        assert place == "access.after_disable_before_audit"
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(failpoints, "hit", crash)
        with pytest.raises(KeyboardInterrupt):
            await principals.disable("ann", actor="mortal")
    [ann] = await principals.list()
    assert ann.disabled_at is None
    assert await principals.database.rows(AUDITED, "mortal") == []


async def test_name_is_never_free_again(principals, keys):
    await principals.create("ann", PrincipalKind.PERSON, actor="x")
    made = await keys.create("bob", VIEWER, actor="x")
    await keys.revoke(made.key.id, actor="x")
    await principals.disable("ann", actor="x")
    for name in ("ann", "bob"):
        for call in (principals.create(name, PrincipalKind.SERVICE, actor="x"), keys.create(name, VIEWER, actor="x")):
            with pytest.raises(NameTaken, match=f"There is a principal {name}"):
                await call
    assert [(each.name, each.kind.value) for each in await principals.list()] == [("ann", "person"), ("bob", "service")]
    assert [key.name for key in await keys.list(revoked=True)] == ["bob"]


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE rota.principal SET name = 'ceo'",
        "UPDATE rota.principal SET b_global = true",
        "UPDATE rota.principal SET shared_name = NULL",
        "DELETE FROM rota.principal",
        "TRUNCATE rota.principal CASCADE",
        "INSERT INTO rota.principal (name, kind, b_global) VALUES ('bus:ann', 'person', true)",
        "INSERT INTO rota.principal (name, kind, b_global) VALUES ('ann', 'person', true)",
        "UPDATE rota.api_key SET principal_id = NULL",
        "UPDATE rota.api_key SET principal_id = gen_random_uuid()",
    ],
)
async def test_tables_refuse_to_rename_delete_or_orphan(principals, keys, statement):
    await keys.create("ann", VIEWER, actor="x")
    with pytest.raises(asyncpg.IntegrityConstraintViolationError):
        await principals.database.run(sql(statement))


async def test_second_of_two_creators_waits_for_the_first_and_is_refused(principals, keys, database):
    async with database.transaction() as tx:
        await tx.run(sql("INSERT INTO rota.principal (name, kind, b_global) VALUES ('ann', 'person', true)"))
        creating = asyncio.create_task(keys.create("ann", VIEWER, actor="x"))
        await until(lambda: database.value(WAITING), what="the second creator waiting for the first")
    with pytest.raises(NameTaken):
        await creating
    assert await keys.list() == []


async def test_key_is_added_before_its_principal_is_disabled_or_not_at_all(principals, keys, database):
    await principals.create("ann", PrincipalKind.PERSON, actor="x")
    async with database.transaction() as tx:
        await tx.run(sql("UPDATE rota.principal SET ts_disabled = now()"))
        adding = asyncio.create_task(keys.create("laptop", VIEWER, actor="x", owner="ann"))
        await until(lambda: database.value(WAITING), what="the key waiting for the principal")
    with pytest.raises(PrincipalDisabled):
        await adding
    assert await keys.list() == []


async def test_key_for_an_unknown_principal_suggests_the_nearest(keys):
    await keys.create("annabel", VIEWER, actor="x")
    with pytest.raises(RotaError, match="There is no principal 'anabel': did you mean annabel"):
        await keys.create("laptop", VIEWER, actor="x", owner="anabel")
    assert [key.name for key in await keys.list()] == ["annabel"]
