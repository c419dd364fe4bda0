"""Reads the audit log, newest entries first."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from rota.infra.postgres import Database, query

NEWEST = query(__package__, "newest")


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True):
    seq: int
    at: datetime
    actor: str
    action: str
    target: str
    detail: dict[str, Any] = {}


async def newest_entries(
    database: Database, *, before: int | None = None, actor: str | None = None, action: str | None = None, most: int
) -> list[AuditRecord]:
    rows = await database.rows(NEWEST, before, actor, action, most)
    return [AuditRecord(**{**dict(row.items()), "detail": msgspec.json.decode(row["detail"])}) for row in rows]
