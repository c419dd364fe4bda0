"""Sagas in Redis, for people to read: `saga:<run>:stack`, what is undone next being first, and `saga:<run>:lock`.

The lock is there while a saga rolls back, and holds its fence, which rises with every change of it. What decides are
the rows of PostgreSQL and their locks: a saga is always told as a whole, as it is there. Who was slow, and tells what
is older than what Redis has, changes nothing; whatever else is wrong `poller` puts right.

A saga that is no run's, but what jobs name as their `workflow_id`, is `show/name`, each percent-encoded.
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

READ = query(__package__, "saga_mirror")
PAGE = query(__package__, "saga_mirror_page")
ROLLING_BACK = query(__package__, "saga_mirror_rolling")
ENDED_SAGAS = query(__package__, "saga_mirror_gone")

CHUNK: Final = 100
SCAN_COUNT: Final = 500
ENTRIES_MAX: Final = 500
"""Of one saga; those after them are not shown."""
FENCE_MAX: Final = 2**53
SagaKey = tuple[ShowId, str]


class SagaMirrorUpdated(msgspec.Struct, frozen=True, tag="told"):
    pass


class SagaMirrorStale(msgspec.Struct, frozen=True, tag="stale"):
    pass


class MirroredSagaEntry(msgspec.Struct, frozen=True):
    """An entry, as people read it."""

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
        """Have Redis show these as they are now; what is over is not shown."""
        rows = await self.database.rows(READ, [show for show, _ in sagas], [name for _, name in sagas], ENTRIES_MAX)
        failpoints.hit("saga.before_tell")
        for row in rows:
            word = (
                row["workflow_id"]
                if row["is_run"]
                else f"{_percent_encode(row['show'])}/{_percent_encode(row['workflow_id'])}"
            )
            await PUBLISH(
                self.client,
                stack=self.keys.saga_stack(word),
                lock=self.keys.saga_lock(word),
                fence=FENCE_MAX if row["fence"] is None else row["fence"],
                lock_ms=self._lock_ms if row["state"] == "rolling_back" else 0,
                entries=_encode_entries(row),
            )
            failpoints.after_send("saga.tell")

    async def fill(self, after: int) -> int:
        """Tell the next `CHUNK` sagas after one of them; the last of them, or 0 at the end."""
        rows = await self.database.rows(PAGE, after, CHUNK)
        await self._publish_rows(rows)
        return rows[-1]["pk_saga"] if len(rows) == CHUNK else 0

    async def publish_rolling_back(self) -> None:
        """Those that roll back, so that their locks stay; of very many, the oldest."""
        await self._publish_rows(await self.database.rows(ROLLING_BACK, CHUNK))

    async def clean(self, cursor: int) -> tuple[int, int]:
        """Remove what is over, of the next keys; how many, and where to go on, 0 being the end."""
        with translate_errors(self.client):
            cursor, found = await self.client.scan(cursor, match=self.keys.scan_pattern(SAGA_STACK), count=SCAN_COUNT)
        names = [key.decode(errors="replace") for key in cast("list[bytes]", found)]
        words = [word for name in names if (word := self.keys.parse(SAGA_STACK, name))]
        named = [_parse_saga_name(word["saga"]) for word in words]
        rows = (
            await self.database.rows(ENDED_SAGAS, [show for show, _ in named], [name for _, name in named])
            if named
            else []
        )
        gone = [words[row["at"] - 1]["saga"] for row in rows]
        if gone:
            failpoints.hit("saga.before_clean")
            with translate_errors(self.client):
                await self.client.unlink(*map(self.keys.saga_stack, gone), *map(self.keys.saga_lock, gone))
            failpoints.after_send("saga.clean")
        return len(gone), int(cursor)

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


def _parse_saga_name(word: str) -> tuple[str, str]:
    """Show and name; no show for a run."""
    show, is_named, name = word.partition("/")
    return (unquote(show), unquote(name)) if is_named else ("", word)
