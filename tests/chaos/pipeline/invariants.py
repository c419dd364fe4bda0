"""What Redis counts of managed shows, looked at beside the procs while everything goes on: for A2.

A token has one row in its life, so a row that is there before Redis is read and after it was there all the while, and
Redis must have counted it. One transaction reads all of Redis, whether it is seeded among it.
"""

from collections import defaultdict

from rota.accounting.live.script_args import SPAN
from rota.infra.redis import translate_errors
from rota.model.units import parse_cores
from tests.chaos.pipeline.history import Kept
from tests.chaos.pipeline.wal import LEVELS, booked
from tests.support.queue import sql

COLUMNS = ("token", "pk_show", *LEVELS.values(), "int_cores_reserved", "int_fence")
ROWS = sql(
    f"SELECT {', '.join(f'{column}::text' for column in COLUMNS)} FROM rota.proc WHERE pk_show = ANY($1::uuid[])"
)


async def look(books, client):
    """One `Kept` for each show that Redis books at this moment."""
    shows = list(await books.managed_shows())
    before = await _rows(books.database, shows)
    answers = {show: await _read(client, books.live.keys.show_keys(show), procs) for show, procs in before.items()}
    after = await _rows(books.database, shows)
    return [
        _kept(procs, {proc.token for proc in after[show]}, answers[show])
        for show, procs in before.items()
        if answers[show] is not None
    ]


async def _rows(database, shows):
    managed = {str(show) for show in shows}
    found = defaultdict(list)
    for row in await database.rows(ROWS, shows):
        found[row["pk_show"]].append(booked(dict(row.items()), managed))
    return found


async def _read(client, keys, procs):
    """Tokens that are there, and cores by key, of one moment; None if Redis did not book the show then."""
    charged = sorted({key for proc in procs for key in proc.keys})
    pipe = client.pipeline(transaction=True)
    pipe.hmget(keys.show, "fence", "run")
    pipe.info("server")
    for proc in procs:
        pipe.hexists(keys.tokens(proc.token // SPAN), str(proc.token % SPAN))
    for key in charged:
        pipe.hget(keys.counter_key(_name(key)), "int_cores")
    with translate_errors(client):
        (fence, run), server, *rest = await pipe.execute()
    if fence is None or run != server["run_id"].encode():
        return None
    held = {proc.token for proc, there in zip(procs, rest, strict=False) if there}
    return held, dict(zip(charged, rest[len(procs) :], strict=True))


def _kept(procs, still, answer):
    held, counted = answer
    counters = {
        key: parse_cores((cores or b"0").decode())
        for key, cores in counted.items()
        if cores is not None or key[0] not in ("job", "layer")
    }
    return Kept([proc for proc in procs if proc.token in still], held, counters)


def _name(key):
    """What Redis calls it: there a pool or a department is named in the books of each show."""
    level, thing = key
    return f"{level}:{thing.rpartition('/')[2]}"
