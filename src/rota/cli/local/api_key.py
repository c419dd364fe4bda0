"""The API key of a `rota up`: created once, stored in the data directory, and registered in PostgreSQL.

It belongs to a principal of the machine, `up-HOST`, and so does the key that replaces it.

The file is written first: after a crash before the registration, the next `rota up` registers the key in the file. A
revoked or expired key stays so, and a new one is created; this is how a key is replaced.
"""

from __future__ import annotations

import re
import secrets
import socket
from contextlib import suppress
from pathlib import Path
from typing import Final

from rota.client import endpoint
from rota.infra import failpoints
from rota.infra.postgres import Database
from rota.model.access import GrantSpec, Role
from rota.model.errors import NameTaken, PrincipalDisabled, Unauthenticated
from rota.model.identity.api_key_format import ENTROPY_BYTES, PlainKey, new_key
from rota.model.identity.principals import PrincipalKind
from rota.server.access import ApiKeyStore, KeyCheck, PrincipalStore

ACTOR: Final = "rota up"


async def ensure_key(database: Database, folder: Path) -> None:
    stored = endpoint.read_key(folder)
    if stored is not None and await _is_accepted(database, stored):
        (folder / endpoint.KEY_FILE).chmod(0o600)
        return
    created = new_key(secrets.token_bytes(ENTROPY_BYTES))
    endpoint.write_key(folder, created)
    failpoints.hit("access.after_file_before_row")
    await _register(database, created)


async def _is_accepted(database: Database, stored: PlainKey) -> bool:
    """Whether PostgreSQL accepts the key, after registering it if it is unknown."""
    try:
        await KeyCheck(database).check(stored.text)
    except Unauthenticated as refused:
        return refused.facts["reason"] == "unknown" and await _register(database, stored)
    return True


async def _register(database: Database, key: PlainKey) -> bool:
    name = _key_name()
    for owner in (name, f"{name[:53]}-{key.id}"):
        await _ensure_principal(database, owner)
        with suppress(PrincipalDisabled):  # the second name is new
            added = await ApiKeyStore(database).add(key, name, [GrantSpec(Role.ADMIN)], actor=ACTOR, owner=owner)
            return added is not None
    return False


async def _ensure_principal(database: Database, name: str) -> None:
    with suppress(NameTaken):
        await PrincipalStore(database).create(name, PrincipalKind.PERSON, actor=ACTOR)


def _key_name() -> str:
    return f"up-{re.sub('[^A-Za-z0-9_.-]', '-', socket.gethostname())}"[:64]
