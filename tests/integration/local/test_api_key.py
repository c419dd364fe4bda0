"""The API key that `rota up` creates for its machine, and how local programs find it with the API address."""

import json
import os
import stat

import pytest

from rota.cli.local import api_key as local_key
from rota.client import endpoint
from rota.infra import failpoints
from rota.local.datadir import DataDir
from rota.model.access import Role
from rota.model.errors import InvalidSetting, SetupFailed
from rota.model.identity.principals import PrincipalKind
from rota.model.settings import resolve
from rota.server.access import ApiKeyStore, KeyCheck, PrincipalStore

KEY = f"rota_{'0' * 10}_{'0' * 39}"


async def authenticate(database, text):
    return await KeyCheck(database).check(text)


def settings(folder, **environ):
    return resolve((), {"ROTA_LOCAL_DATA_DIR": str(folder), **environ}).settings


async def test_up_creates_its_key_once_readable_only_by_its_owner(database, tmp_path):
    await local_key.ensure_key(database, tmp_path)
    kept = endpoint.read_key(tmp_path)
    assert stat.S_IMODE((tmp_path / "api.key").stat().st_mode) == 0o600
    assert (await authenticate(database, kept.text)).has_role(Role.ADMIN)
    (tmp_path / "api.key").chmod(0o644)
    await local_key.ensure_key(database, tmp_path)
    assert stat.S_IMODE((tmp_path / "api.key").stat().st_mode) == 0o600
    assert endpoint.read_key(tmp_path) == kept
    assert len(await ApiKeyStore(database).list()) == 1


@pytest.mark.parametrize("how", ["revoked", "damaged", "removed"])
async def test_invalid_key_of_up_is_replaced(database, tmp_path, how):
    await local_key.ensure_key(database, tmp_path)
    kept = endpoint.read_key(tmp_path)
    match how:
        case "revoked":
            await ApiKeyStore(database).revoke(kept.id, actor="ann")
        case "damaged":
            (tmp_path / "api.key").write_text(kept.text[:-3])
        case "removed":
            (tmp_path / "api.key").unlink()
    await local_key.ensure_key(database, tmp_path)
    made = endpoint.read_key(tmp_path)
    assert made != kept
    assert (await authenticate(database, made.text)).has_role(Role.ADMIN)


async def test_keys_of_up_belong_to_one_principal_unless_it_was_disabled(database, tmp_path):
    keys, principals = ApiKeyStore(database), PrincipalStore(database)
    await local_key.ensure_key(database, tmp_path)
    [first] = await keys.list()
    await keys.revoke(first.id, actor="ann")
    await local_key.ensure_key(database, tmp_path)
    [second] = await keys.list()
    [principal] = await principals.list()
    assert first.principal == second.principal == principal.name == first.name
    assert (principal.kind, principal.is_global) == (PrincipalKind.PERSON, True)
    await principals.disable(principal.name, actor="ann")
    await local_key.ensure_key(database, tmp_path)
    text = endpoint.read_key(tmp_path).text
    assert (await authenticate(database, text)).principal.name == f"{principal.name}-{endpoint.read_key(tmp_path).id}"


async def test_up_that_crashed_before_storing_its_key_reuses_the_key_file(database, tmp_path, monkeypatch):
    class Crashed(Exception):
        pass

    def crash(place):
        if place == "access.after_file_before_row":
            raise Crashed

    with monkeypatch.context() as patched:
        patched.setattr(failpoints, "hit", crash)
        with pytest.raises(Crashed):
            await local_key.ensure_key(database, tmp_path)
    kept = endpoint.read_key(tmp_path)
    await local_key.ensure_key(database, tmp_path)
    assert endpoint.read_key(tmp_path) == kept
    assert (await authenticate(database, kept.text)).has_role(Role.ADMIN)


async def test_configured_api_takes_precedence_and_the_local_key_is_not_sent_to_it(database, tmp_path):
    await local_key.ensure_key(database, tmp_path)
    found = endpoint.find_endpoint(settings(tmp_path, ROTA_API_URL="https://rota.internal/", ROTA_API_KEY=KEY))
    assert (found.url, found.key) == ("https://rota.internal", KEY)
    assert KEY not in repr(found)
    with pytest.raises(InvalidSetting, match=r"api.url is set and api.key is not: set ROTA_API_KEY"):
        endpoint.find_endpoint(settings(tmp_path, ROTA_API_URL="https://rota.internal"))


async def test_api_of_a_running_up_is_found_with_its_key(database, tmp_path):
    with pytest.raises(InvalidSetting, match="No API is configured: set ROTA_API_URL and ROTA_API_KEY"):
        endpoint.find_endpoint(settings(tmp_path))
    owned = DataDir.claim(tmp_path)
    try:
        state = {"pid": os.getpid(), "listen": "http://127.0.0.1:7682", "urls": {}, "worker": "x"}
        (tmp_path / "up.json").write_text(json.dumps(state))
        with pytest.raises(InvalidSetting, match=r"api.key has no valid key"):
            endpoint.find_endpoint(settings(tmp_path))
        await local_key.ensure_key(database, tmp_path)
        found = endpoint.find_endpoint(settings(tmp_path))
        assert (found.url, found.key) == ("http://127.0.0.1:7682", endpoint.read_key(tmp_path).text)
        assert endpoint.find_endpoint(settings(tmp_path, ROTA_API_KEY=KEY)).key == KEY
    finally:
        owned.release()
    with pytest.raises(InvalidSetting, match="No API is configured"):
        endpoint.find_endpoint(settings(tmp_path))


def test_unusable_key_file_raises_setup_failed(tmp_path):
    (tmp_path / "api.key").mkdir()
    with pytest.raises(SetupFailed, match="cannot be used"):
        endpoint.read_key(tmp_path)


def test_invalid_configured_key_is_refused_and_not_shown(tmp_path):
    with pytest.raises(InvalidSetting) as refused:
        settings(tmp_path, ROTA_API_KEY="hunter2")
    assert "api.key" in refused.value.sentence
    assert "hunter2" not in refused.value.sentence
