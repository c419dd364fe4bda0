"""The upgrade gives every key a principal, and no key a right; servers of the version before run meanwhile."""

import asyncpg
import pytest

from rota.infra.postgres import Database, PostgresTarget, migrate
from rota.infra.postgres.migration_files import discover, discover_functions
from rota.model.errors import Unauthenticated
from rota.model.identity.api_key_format import ENTROPY_BYTES, new_key
from rota.server.access import ApiKeyStore, KeyCheck, PrincipalStore

FIRST = 33
"""The migration that adds principals."""
ADD = """
INSERT INTO rota.api_key (id, digest, name, ts_created, ts_revoked)
VALUES ($1, $2, $3, timestamptz '2026-01-01' + make_interval(days => $4), CASE WHEN $5::boolean THEN now() END)"""
ADD_BY_OLDER = "INSERT INTO rota.api_key (id, digest, name) VALUES ($1, $2, $3)"
STATE_BY_OLDER = "SELECT rota.api_key_state(k) FROM rota.api_key k WHERE k.id = $1"


def plain(number):
    return new_key(bytes([number]) * ENTROPY_BYTES)


async def before_the_upgrade(url):
    functions = [each for each in discover_functions() if each.name != "server/access/functions/principals.sql"]
    await migrate(url, migrations=[each for each in discover() if each.number < FIRST], functions=functions)
    return await asyncpg.connect(url)


@pytest.fixture
async def old(empty_database_url):
    connection = await before_the_upgrade(empty_database_url)
    yield connection
    await connection.close()


async def actors(url, numbers):
    database = await Database.open(PostgresTarget(url=url))
    try:
        check = KeyCheck(database)
        return [(await check.check(plain(number).text)).principal for number in numbers]
    finally:
        await database.close()


async def test_oldest_key_keeps_the_name_and_the_others_get_distinct_ones(old, empty_database_url):
    long = "x" * 64
    # Name, age in days, revoked. The fourth key is named as the second will be, and so cannot stop the upgrade.
    given = [
        ("ceo", 1, False), ("ceo", 2, False), ("ci", 1, False), (f"ceo-{plain(2).id}", 3, False), ("ceo", 3, False),
        ("rotated", 1, True), ("rotated", 2, False), (long, 1, False), (long, 2, False),
    ]  # fmt: skip
    for number, (name, day, revoked) in enumerate(given, start=1):
        await old.execute(ADD, plain(number).id, plain(number).digest, name, day, revoked)
    await migrate(empty_database_url)
    one, two, three, four, five, seven, eight, nine = await actors(empty_database_url, (1, 2, 3, 4, 5, 7, 8, 9))
    assert [(each.name, each.is_global, each.shared_name) for each in (one, three, four, five, seven, eight, nine)] == [
        ("ceo", True, ""),
        ("ci", True, ""),
        (f"ceo-{plain(2).id}", True, ""),
        (f"ceo-{plain(5).id}", False, "ceo"),
        (f"rotated-{plain(7).id}", False, "rotated"),
        (long, True, ""),
        (f"{'x' * 53}-{plain(9).id}", False, long),
    ]
    assert two.name.startswith(f"ceo-{plain(2).id}-")
    assert (two.is_global, two.shared_name) == (False, "ceo")
    owners = await old.fetch("SELECT principal_id FROM rota.api_key")
    assert len({row["principal_id"] for row in owners}) == len(given)


async def test_key_of_an_older_server_gets_a_principal_of_its_own(old, empty_database_url):
    await old.execute(ADD, plain(1).id, plain(1).digest, "ceo", 1, False)
    await migrate(empty_database_url, "pre")
    for number, name in ((2, "ceo"), (3, "ci"), (4, "ci")):
        await old.execute(ADD_BY_OLDER, plain(number).id, plain(number).digest, name)
    await migrate(empty_database_url)
    ceo, second, ci, other = await actors(empty_database_url, (1, 2, 3, 4))
    assert (ceo.name, ci.name, second.shared_name, other.shared_name) == ("ceo", "ci", "ceo", "ci")
    assert len({each.name for each in (ceo, second, ci, other)}) == 4
    assert [each.is_global for each in (ceo, second, ci, other)] == [True, False, False, False]


async def test_key_added_between_migration_and_trigger_gets_a_principal_at_the_end(old, empty_database_url):
    await old.execute(ADD, plain(1).id, plain(1).digest, "ceo", 1, False)
    pre = [each for each in discover() if each.number <= FIRST]
    await migrate(empty_database_url, migrations=pre, functions=())
    await old.execute(ADD_BY_OLDER, plain(2).id, plain(2).digest, "ceo")
    await migrate(empty_database_url)
    [late] = await actors(empty_database_url, [2])
    assert (late.name.startswith(f"ceo-{plain(2).id}-"), late.is_global, late.shared_name) == (True, False, "ceo")


async def test_older_server_refuses_keys_of_a_disabled_principal(old, empty_database_url):
    await old.execute(ADD, plain(1).id, plain(1).digest, "ann", 1, False)
    await migrate(empty_database_url, "pre")
    database = await Database.open(PostgresTarget(url=empty_database_url))
    try:
        await PrincipalStore(database).disable("ann", actor="x")
        assert await old.fetchval(STATE_BY_OLDER, plain(1).id) == "revoked"
        with pytest.raises(Unauthenticated) as refused:
            await KeyCheck(database).check(plain(1).text)
        assert refused.value.facts["reason"] == "disabled"
        [key] = await ApiKeyStore(database).list()
        assert key.state == "disabled"
    finally:
        await database.close()
