"""The key of a `rota up`: made once, kept in its data directory, and taken in by PostgreSQL.

The file is written first: if we die before PostgreSQL has the key, the next `rota up` finds the file and takes the same
key in. One that was revoked or has expired stays so, and a new one is made; that is how it is replaced.
"""

from __future__ import annotations

import re
import secrets
import socket
from pathlib import Path
from typing import Final

from rota.infra import failpoints
from rota.infra.postgres import Database
from rota.local import api_key
from rota.model.access import GrantSpec, Role
from rota.model.api_key_format import ENTROPY_BYTES, PlainKey, new_key
from rota.model.errors import Unauthenticated
from rota.server.access import ApiKeyStore, KeyCheck

ACTOR: Final = "rota up"


async def ensure_key(database: Database, folder: Path) -> None:
    kept = api_key.read_key(folder)
    if kept is not None and await _is_accepted(database, kept):
        (folder / api_key.KEY_FILE).chmod(0o600)
        return
    made = new_key(secrets.token_bytes(ENTROPY_BYTES))
    api_key.write_key(folder, made)
    failpoints.hit("access.after_file_before_row")
    await _register(database, made)


async def _is_accepted(database: Database, kept: PlainKey) -> bool:
    """Whether it opens, now that PostgreSQL was given the chance to take it in."""
    try:
        await KeyCheck(database).check(kept.text)
    except Unauthenticated as refused:
        return refused.facts["reason"] == "unknown" and await _register(database, kept)
    return True


async def _register(database: Database, key: PlainKey) -> bool:
    added = await ApiKeyStore(database).add(key, _key_name(), [GrantSpec(Role.ADMIN)], actor=ACTOR)
    return added is not None


def _key_name() -> str:
    return f"up-{re.sub('[^A-Za-z0-9_.-]', '-', socket.gethostname())}"[:64]
