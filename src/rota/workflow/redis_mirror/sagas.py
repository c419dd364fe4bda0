"""Sagas in Redis, for people to read: `saga:<run>:stack`, the next compensation first, and `saga:<run>:lock`.

The lock exists while a saga rolls back, and contains its fence, which increases with every change. The rows of
PostgreSQL and their locks decide: a saga is always written as a whole, as stored there. A slow writer with an older
state changes nothing; the reconciler repairs everything else.

A saga that belongs to a `workflow_id` of jobs instead of a run is named `show/name`, each percent-encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast
from urllib.parse import quote, unquote

import msgspec
from redis.asyncio import Redis

from rota.infra import failpoints
from rota.infra.postgres import Database, Record, query
from rota.infra.redis import RedisKeys, script, translate_errors
from rota.infra.redis.keys import SAGA_STACK
from rota.model.ids import ShowId
from rota.workflow.notifier import SagaKey

READ = query(__package__, "saga_mirror")
PAGE = query(__package__, "saga_mirror_page")
ROLLING_BACK = query(__package__, "saga_mirror_rolling")
ENDED_SAGAS = query(__package__, "saga_mirror_gone")

CHUNK: Final = 100
SCAN_COUNT: Final = 500
ENTRIES_MAX: Final = 500
"""Per saga; further entries are not shown."""
FENCE_MAX: Final = 2**53


class SagaMirrorUpdated(msgspec.Struct, frozen=True, tag="told"):
    pass


class SagaMirrorStale(msgspec.Struct, frozen=True, tag="stale"):
    pass


class MirroredSagaEntry(msgspec.Struct, frozen=True):
    """An entry as shown in Redis."""

    step: str
    job: str
    state: str
    topic: str
    fence: int


class _TemplateTopic(msgspec.Struct, frozen=True):
    topic: str = "default"


PUBLISH = script(__package__, "saga_tell", replies=SagaMirrorUpdated | SagaMirrorStale)
_topic = msgspec.msgpack.Decoder(_TemplateTopic)
_json = msgspec.json.Encoder()


class SagaMirror:
    def __init__(self, database: Database, client: Redis, lock_s: float = 120.0, keys: RedisKeys | None = None) -> None:
        self.database = database
        self.client = client
        self.keys = keys or RedisKeys()
        self._lock_ms = round(lock_s * 1000)

    async def publish(self, sagas: Sequence[SagaKey]) -> None:
        """Write these sagas as they are now; ended ones are removed."""
        rows = await self.database.rows(READ, [show for show, _ in sagas], [name for _, name in sagas], ENTRIES_MAX)
        failpoints.hit("saga.before_tell")
        for row in rows:
            name = (
                row["workflow_id"]
                if row["is_run"]
                else f"{_percent_encode(row['show'])}/{_percent_encode(row['workflow_id'])}"
            )
            await PUBLISH(
                self.client,
                stack=self.keys.saga_stack(name),
                lock=self.keys.saga_lock(name),
                fence=FENCE_MAX if row["fence"] is None else row["fence"],
                lock_ms=self._lock_ms if row["state"] == "rolling_back" else 0,
                entries=_encode_entries(row),
            )
            failpoints.after_send("saga.tell")

    async def fill(self, after: int) -> int:
        """Write the next `CHUNK` sagas after id `after`; returns the last id, or 0 at the end."""
        rows = await self.database.rows(PAGE, after, CHUNK)
        await self._publish_rows(rows)
        return rows[-1]["pk_saga"] if len(rows) == CHUNK else 0

    async def publish_rolling_back(self) -> None:
        """Write sagas that roll back, so that their locks do not expire; of very many, the oldest."""
        await self._publish_rows(await self.database.rows(ROLLING_BACK, CHUNK))

    async def clean(self, cursor: int) -> tuple[int, int]:
        """Remove ended sagas among the next keys; returns how many, and the next cursor, 0 at the end."""
        with translate_errors(self.client):
            cursor, found = await self.client.scan(cursor, match=self.keys.scan_pattern(SAGA_STACK), count=SCAN_COUNT)
        names = [key.decode(errors="replace") for key in cast("list[bytes]", found)]
        parsed = [fields for name in names if (fields := self.keys.parse(SAGA_STACK, name))]
        named = [_parse_saga_name(fields["saga"]) for fields in parsed]
        rows = (
            await self.database.rows(ENDED_SAGAS, [show for show, _ in named], [name for _, name in named])
            if named
            else []
        )
        ended = [parsed[row["at"] - 1]["saga"] for row in rows]
        if ended:
            failpoints.hit("saga.before_clean")
            with translate_errors(self.client):
                await self.client.unlink(*map(self.keys.saga_stack, ended), *map(self.keys.saga_lock, ended))
            failpoints.after_send("saga.clean")
        return len(ended), int(cursor)

    async def _publish_rows(self, rows: Sequence[Record]) -> None:
        if rows:
            await self.publish([(ShowId(row["pk_show"]), row["workflow_id"]) for row in rows])


def _encode_entries(row: Record) -> list[str]:
    columns = (row["steps"] or (), row["jobs"] or (), row["states"] or (), row["templates"] or ())
    entries = zip(*columns, strict=True)
    return [
        _json.encode(MirroredSagaEntry(step, str(job), state, _topic_of(template), row["fence"])).decode()
        for step, job, state, template in entries
    ]


def _topic_of(template: bytes) -> str:
    try:
        return _topic.decode(template).topic
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""


def _percent_encode(text: str) -> str:
    return quote(text, safe="")


def _parse_saga_name(key: str) -> tuple[str, str]:
    """Show and name; an empty show for a run."""
    show, is_named, name = key.partition("/")
    return (unquote(show), unquote(name)) if is_named else ("", key)
