"""Samples of the Redis ledger of managed shows together with the procs, during a run: for A2.

A token has exactly one row in its lifetime, so a row present before and after Redis is read was present throughout, and
Redis must have counted it. One MULTI transaction reads all of Redis, including whether it is seeded.
"""

from collections import defaultdict

from rota.accounting.live.script_args import SPAN
from rota.infra.redis import translate_errors
from rota.model.units import parse_cores
from tests.chaos.pipeline.history import LedgerSample
from tests.chaos.pipeline.wal import LEVELS, booked
from tests.support.queue import sql

COLUMNS = ("token", "pk_show", *LEVELS.values(), "int_cores_reserved", "int_fence")
ROWS = sql(
    f"SELECT {', '.join(f'{column}::text' for column in COLUMNS)} FROM rota.proc WHERE pk_show = ANY($1::uuid[])"
    " AND (int_cores_reserved > 0 OR int_gpus_reserved > 0)"
)


async def sample_ledger(accounting, client):
    """One `LedgerSample` for each show that is seeded in Redis."""
    shows = list(await accounting.managed_shows())
    before = await _rows(accounting.database, shows)
    answers = {show: await _read(client, accounting.live.keys.show_keys(show), procs) for show, procs in before.items()}
    after = await _rows(accounting.database, shows)
    return [
        _ledger_sample(procs, {proc.token for proc in after[show]}, answers[show])
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
    """Tokens present and cores by key at one moment; None if the show was not seeded in Redis.

    A job or layer that got its first limits while its frames ran has no counter until the reconciliation that counts
    them: until then the show keeps its old fence, and PostgreSQL refuses its bookings.
    """
    charged = sorted({key for proc in procs for key in proc.keys})
    pipe = client.pipeline(transaction=True)
    pipe.hmget(keys.show, "fence", "run", "uncounted")
    pipe.info("server")
    for proc in procs:
        pipe.hexists(keys.tokens(proc.token // SPAN), str(proc.token % SPAN))
    for key in charged:
        pipe.hget(keys.counter_key(_name(key)), "int_cores")
    with translate_errors(client):
        (fence, run, uncounted), server, *rest = await pipe.execute()
    if fence is None or run != server["run_id"].encode():
        return None
    held = {proc.token for proc, present in zip(procs, rest, strict=False) if present}
    counted = dict(zip(charged, rest[len(procs) :], strict=True))
    if uncounted is not None:
        counted |= {key: None for key in charged if key[0] in ("job", "layer")}
    return held, counted


def _ledger_sample(procs, still, answer):
    held, counted = answer
    counters = {
        key: parse_cores((cores or b"0").decode())
        for key, cores in counted.items()
        if cores is not None or key[0] not in ("job", "layer")
    }
    return LedgerSample([proc for proc in procs if proc.token in still], held, counters)


def _name(key):
    """The name in Redis, where pools and departments are named per show."""
    level, id_ = key
    return f"{level}:{id_.rpartition('/')[2]}"
