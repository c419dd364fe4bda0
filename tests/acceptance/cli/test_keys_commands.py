"""Keys as an administrator types them."""

import json
import os
import pwd
import re

import pytest

from rota.accounting.admin import QuotaAdmin
from rota.cli.keys import commands as keys_commands
from rota.model.access import GrantSpec, Role
from rota.model.api_key_format import ENTROPY_BYTES, new_key, parse_key
from rota.server.access import ApiKeyStore, KeyCheck
from tests.contract.ledger_suite import sql
from tests.support.commands import Terminal, rows

ME = f"cli:{pwd.getpwuid(os.getuid()).pw_name}"
TRAIL = sql("SELECT actor, action FROM rota.audit ORDER BY seq OFFSET $1")
ENTRIES = sql("SELECT count(*) FROM rota.audit")
TOLD = re.compile(r"Created key (\w{10}) \(ci\): (.*)\.")


@pytest.fixture
def typed(monkeypatch, capsys, tmp_path, database_url):
    """Neither Redis nor NATS are known: these commands need none."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROTA_POSTGRES_URL", database_url)
    return Terminal(monkeypatch, capsys)


@pytest.fixture
async def keys(database):
    for name in ("film", "short"):
        await QuotaAdmin(database).create_show(name, actor="ann")
    return ApiKeyStore(database)


async def opened(database, text):
    return await KeyCheck(database).check(text)


async def test_a_key_is_made_shown_once_listed_and_revoked(typed, keys, database):
    assert "There is no key: `rota keys create" in await typed.out("keys list")
    told, text, once = (await typed.out("keys create ci --role submitter --show short --show film")).splitlines()
    key_id, may = TOLD.fullmatch(told).groups()
    assert (may, "shown only once" in once) == ("submitter in film, short", True)
    actor = await opened(database, text)
    assert (actor.key, actor.has_role(Role.SUBMITTER, "film"), actor.has_role(Role.VIEWER)) == (key_id, True, False)
    head, line = rows(await typed.out("keys list"))
    assert head == "id name may state made expires last used"
    assert re.fullmatch(rf"{key_id} ci submitter in film, short active [\d.]+ m?s ago never never", line)
    assert parse_key(text).text.rpartition("_")[2] not in line
    assert "is revoked: it is refused everywhere within a second" in await typed.out(f"keys revoke {key_id}")
    assert "Nothing changed: key" in await typed.out(f"keys revoke {key_id}")
    assert "There is no key:" in await typed.out("keys list")
    assert " revoked " in rows(await typed.out("keys list --all"))[1]


async def test_without_a_show_the_role_is_in_every_show_and_a_life_can_be_given(typed, keys, database):
    told, text, _ = (await typed.out("keys create ci --role ADMIN --expires 30d")).splitlines()
    assert re.fullmatch(r"admin in every show, until \d{4}-\d\d-\d\d \d\d:\d\d UTC", TOLD.fullmatch(told)[2])
    assert (await opened(database, text)).has_role(Role.ADMIN)
    [key] = await keys.list()
    assert (key.expires_at - key.created_at).days == 30


async def test_programs_get_the_same_as_json(typed, keys, database):
    made = json.loads(await typed.out("keys create ci --role viewer --show film --json"))
    assert (await opened(database, made["key"])).key == made["id"]
    assert (made["name"], made["state"], made["expires_at"], made["notes"]) == ("ci", "active", None, [])
    assert [(grant["role"], grant["show"]["name"]) for grant in made["grants"]] == [("viewer", "film")]
    [listed] = json.loads(await typed.out("keys list --json"))
    assert listed == {name: made[name] for name in made if name not in ("key", "notes")}
    gone = json.loads(await typed.out("keys revoke ci --json"))
    assert (gone["changed"], gone["state"]) == (True, "revoked")
    assert json.loads(await typed.out(f"keys revoke {made['id']} --json"))["changed"] is False
    assert json.loads(await typed.out("keys list --json")) == []


async def test_another_key_of_the_same_name_is_told_since_its_secret_may_have_been_lost(typed, keys):
    lost = await keys.create("ci", [GrantSpec(Role.VIEWER)], actor="ann")
    told = (await typed.out("keys create ci --role viewer")).splitlines()
    assert re.match(
        rf"There is another key ci, {lost.key.id}, created .* ago and never used: `rota keys revoke", told[3]
    )


async def test_every_change_is_in_the_trail_in_the_name_of_the_os_user(typed, keys, database):
    began = await database.value(ENTRIES)
    await typed.out("keys create ci --role viewer")
    await typed.out("keys revoke ci")
    await typed("keys revoke ci")
    found = [tuple(row) for row in await database.rows(TRAIL, began)]
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
        ("keys revoke nigthly", "There is no key 'nigthly': did you mean nightly?"),
        ("keys revoke 000000000z", "There is no key '000000000z'"),
    ],
)
async def test_bad_input_is_one_sentence_and_changes_nothing(typed, keys, line, sentence):
    await keys.create("nightly", [GrantSpec(Role.VIEWER)], actor="ann")
    said = await typed(line)
    assert said.status == 2
    assert sentence in said.err
    assert said.err.count("\n") == 1
    assert [key.name for key in await keys.list(revoked=True)] == ["nightly"]


async def test_a_whole_key_given_by_mistake_is_not_repeated(typed, keys):
    made = await keys.create("ci", [GrantSpec(Role.VIEWER)], actor="ann")
    secret = made.plain.text.rpartition("_")[2]
    stranger = new_key(bytes(range(ENTROPY_BYTES))).text
    for line in (f"keys create {stranger} --role viewer", f"keys revoke {stranger}", f"keys revoke Bearer={stranger}"):
        said = await typed(line)
        assert said.status == 2
        assert stranger.rpartition("_")[2][:8] not in said.out + said.err
    assert secret not in await typed.out(f"keys revoke {made.plain.text}")


async def test_every_command_has_help(typed):
    for command in keys_commands.keys_app.registered_commands:
        assert "Usage:" in await typed.out(f"keys {command.name} --help")
