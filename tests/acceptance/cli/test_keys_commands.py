"""API key commands of administrators."""

import json
import os
import pwd
import re

import pytest

from rota.accounting.admin import QuotaAdmin
from rota.cli.keys import commands as keys_commands
from rota.model.access import GrantSpec, Role
from rota.model.errors import Unauthenticated
from rota.model.identity.api_key_format import ENTROPY_BYTES, new_key, parse_key
from rota.server.access import ApiKeyStore, KeyCheck
from tests.contract.ledger_suite import sql
from tests.support.commands import Terminal, rows

ME = f"cli:{pwd.getpwuid(os.getuid()).pw_name}"
AUDIT = sql("SELECT actor, action FROM rota.audit ORDER BY seq OFFSET $1")
ENTRIES = sql("SELECT count(*) FROM rota.audit")
CREATED = re.compile(r"Created key (\w{10}) \(ci\): (.*)\.")


@pytest.fixture
def cli(monkeypatch, capsys, tmp_path, database_url):
    """Without Redis and NATS URLs: these commands need neither."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROTA_POSTGRES_URL", database_url)
    return Terminal(monkeypatch, capsys)


@pytest.fixture
async def keys(database):
    for name in ("film", "short"):
        await QuotaAdmin(database).create_show(name, actor="ann")
    return ApiKeyStore(database)


async def authenticate(database, text):
    return await KeyCheck(database).check(text)


async def test_key_is_created_shown_once_listed_and_revoked(cli, keys, database):
    assert "There is no key: `rota keys create" in await cli.out("keys list")
    created, text, once = (await cli.out("keys create ci --role submitter --show short --show film")).splitlines()
    key_id, grants = CREATED.fullmatch(created).groups()
    assert (grants, "shown only once" in once) == ("submitter in film, short", True)
    actor = await authenticate(database, text)
    assert (actor.key, actor.has_role(Role.SUBMITTER, "film"), actor.has_role(Role.VIEWER)) == (key_id, True, False)
    head, line = rows(await cli.out("keys list"))
    assert head == "id name principal may state made expires last used"
    assert re.fullmatch(rf"{key_id} ci ci submitter in film, short active [\d.]+ m?s ago never never", line)
    assert parse_key(text).text.rpartition("_")[2] not in line
    assert "is revoked: it is refused everywhere within a second" in await cli.out(f"keys revoke {key_id}")
    assert "Nothing changed: key" in await cli.out(f"keys revoke {key_id}")
    assert "There is no key:" in await cli.out("keys list")
    assert " revoked " in rows(await cli.out("keys list --all"))[1]


async def test_key_without_show_covers_every_show_and_accepts_expiry(cli, keys, database):
    created, text, _ = (await cli.out("keys create ci --role ADMIN --expires 30d")).splitlines()
    assert re.fullmatch(r"admin in every show, until \d{4}-\d\d-\d\d \d\d:\d\d UTC", CREATED.fullmatch(created)[2])
    assert (await authenticate(database, text)).has_role(Role.ADMIN)
    [key] = await keys.list()
    assert (key.expires_at - key.created_at).days == 30


async def test_key_commands_print_the_same_data_as_json(cli, keys, database):
    made = json.loads(await cli.out("keys create ci --role viewer --show film --json"))
    assert (await authenticate(database, made["key"])).key == made["id"]
    assert (made["name"], made["state"], made["expires_at"], made["notes"]) == ("ci", "active", None, [])
    assert [(grant["role"], grant["show"]["name"]) for grant in made["grants"]] == [("viewer", "film")]
    [listed] = json.loads(await cli.out("keys list --json"))
    assert listed == {name: made[name] for name in made if name not in ("key", "notes")}
    revoked = json.loads(await cli.out("keys revoke ci --json"))
    assert (revoked["changed"], revoked["state"]) == (True, "revoked")
    assert json.loads(await cli.out(f"keys revoke {made['id']} --json"))["changed"] is False
    assert json.loads(await cli.out("keys list --json")) == []


async def test_create_key_with_existing_name_prints_a_note(cli, keys):
    lost = await keys.create("ci", [GrantSpec(Role.VIEWER)], actor="ann")
    created = (await cli.out("keys create ci --role viewer --for ci")).splitlines()
    assert re.match(
        rf"There is another key ci, {lost.key.id}, created .* ago and never used: `rota keys revoke", created[3]
    )


async def test_principal_is_created_given_keys_listed_and_disabled(cli, keys, database):
    assert "There is no principal: `rota keys create" in await cli.out("principals list")
    assert "Created principal dora: `rota keys create" in await cli.out("principals create dora")
    made = json.loads(await cli.out("keys create laptop --role viewer --for dora --json"))
    assert (made["name"], made["principal"]) == ("laptop", "dora")
    assert "Created key" in await cli.out("keys create ci --role viewer")
    assert rows(await cli.out("principals list")) == [
        "name kind keys state named by policies",
        "ci service 1 active yes",
        "dora person 1 active yes",
    ]
    assert "its keys are refused everywhere within a second" in await cli.out("principals disable dora")
    assert await cli.out("principals disable dora") == "Nothing changed: principal dora is disabled.\n"
    with pytest.raises(Unauthenticated, match="The principal dora of this API key is disabled"):
        await authenticate(database, made["key"])
    assert " disabled " in rows(await cli.out("keys list"))[2]


async def test_key_changes_are_audited_under_the_os_user(cli, keys, database):
    began = await database.value(ENTRIES)
    await cli.out("keys create ci --role viewer")
    await cli.out("keys revoke ci")
    await cli("keys revoke ci")
    found = [tuple(row) for row in await database.rows(AUDIT, began)]
    assert found == [(ME, "key.create"), (ME, "key.revoke")]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("keys create ci --role oprator", "'oprator' is not a known role: did you mean operator?"),
        ("keys create ci --role viewer --show flim", "There is no show 'flim': did you mean film?"),
        ("keys create ci --role viewer --show film --show film", "A key can have only one role per show"),
        ("keys create ci --role viewer --expires soon", "'soon' is not a valid duration"),
        ("keys create ci --role viewer --expires 0s", "use 1s to 3650d"),
        ("keys create ci --role viewer --expires 99999d", "use 1s to 3650d"),
        ("keys create c/i --role viewer", "'c/i' is not a valid key name"),
        ("keys create rota_x --role viewer", "cannot begin with rota_"),
        ("keys create ci --role viewer --for nigthly", "There is no principal 'nigthly': did you mean nightly?"),
        ("keys create ci --role viewer --kind robot", "'robot' is not a kind of principal: use person or service."),
        ("principals create c/i", "'c/i' is not a valid principal name"),
        ("principals disable nobody", "There is no principal 'nobody'"),
        ("keys revoke nigthly", "There is no key 'nigthly': did you mean nightly?"),
        ("keys revoke 000000000z", "There is no key '000000000z'"),
    ],
)
async def test_invalid_key_command_prints_one_error_and_changes_nothing(cli, keys, line, sentence):
    await keys.create("nightly", [GrantSpec(Role.VIEWER)], actor="ann")
    result = await cli(line)
    assert result.status == 2
    assert sentence in result.err
    assert result.err.count("\n") == 1
    assert [key.name for key in await keys.list(revoked=True)] == ["nightly"]


@pytest.mark.parametrize("line", ["keys create nightly --role viewer", "principals create nightly"])
async def test_name_of_a_principal_is_not_given_to_another(cli, keys, line):
    await keys.create("nightly", [GrantSpec(Role.VIEWER)], actor="ann")
    result = await cli(line)
    assert (result.status, result.err.count("\n")) == (1, 1)
    assert "There is a principal nightly, and its name is never given to another" in result.err
    assert [key.name for key in await keys.list(revoked=True)] == ["nightly"]


async def test_full_key_passed_by_mistake_is_not_echoed(cli, keys):
    made = await keys.create("ci", [GrantSpec(Role.VIEWER)], actor="ann")
    secret = made.plain.text.rpartition("_")[2]
    unknown_key = new_key(bytes(range(ENTROPY_BYTES))).text
    for line in (
        f"keys create {unknown_key} --role viewer",
        f"keys revoke {unknown_key}",
        f"keys revoke Bearer={unknown_key}",
    ):
        result = await cli(line)
        assert result.status == 2
        assert unknown_key.rpartition("_")[2][:8] not in result.out + result.err
    assert secret not in await cli.out(f"keys revoke {made.plain.text}")


async def test_every_key_command_has_help(cli):
    for command in keys_commands.keys_app.registered_commands:
        assert "Usage:" in await cli.out(f"keys {command.name} --help")
