"""Ledger mutants, each without one rule: the explorer must detect every one of them.

A mutant changes the text of a script (during one test) or of a function in the test database.
"""

import hashlib
import importlib.resources
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tests.chaos.accounting.explorer import scripts

FUNCTIONS = importlib.resources.files("rota.accounting").joinpath("functions")


@dataclass(frozen=True)
class Mutant:
    rule: str
    """The rule that the mutant removes."""
    script: str = ""
    """The script to change; `*` for the library that all scripts share."""
    function: str = ""
    was: str = ""
    now: str = ""
    drop: str = ""
    """A trigger to disable, as `name ON table`."""
    seed: int = 0
    """A schedule that detects the mutant; if it no longer does, the first schedules are tried."""


MUTANTS = (
    Mutant("insert checks the fence", seed=1, function="proc_insert", was=" OR held.int_fence <> fence", now=""),
    Mutant(
        "insert checks tombstones",
        seed=109,
        function="proc_insert",
        was="EXIT WHEN NOT EXISTS (SELECT FROM rota.proc_buried(of_show, runs) AS b WHERE b.token <> ALL (left_out));",
        now="EXIT;",
    ),
    Mutant(
        "deleted row leaves a tombstone",
        seed=109,
        function="proc_end",
        was="PERFORM rota.proc_dig(of_show, coalesce(held.int_fence, 0), firsts, lasts);",
        now="",
    ),
    Mutant(
        "managed flag and fence are read after the lock",
        seed=9,
        function="show_shared",
        was="""  PERFORM pg_advisory_xact_lock_shared(1633903476, rota.show_lock_number(of_show));
  SELECT * INTO held FROM rota.show WHERE pk_show = of_show;
""",
        now="""  SELECT * INTO held FROM rota.show WHERE pk_show = of_show;
  PERFORM pg_advisory_xact_lock_shared(1633903476, rota.show_lock_number(of_show));
""",
    ),
    Mutant("lowered cap raises the fence", seed=0, drop="lowered ON rota.subscription"),
    Mutant(
        "release skips newer bookings",
        seed=769,
        script="release",
        was="standing_fence > fence",
        now="false",
    ),
    Mutant(
        "release applies only to bookings of its fence",
        seed=113,
        script="release",
        was="(booked == 0 or hold.since == booked)",
        now="true",
    ),
    Mutant(
        "booking behind the reconcile cursor updates the shadow counters",
        seed=84,
        script="book",
        was="if #cast_by > 0 then cast_shadow(cast_by) end",
        now="",
    ),
    Mutant(
        "release behind the reconcile cursor updates the shadow counters",
        seed=13,
        script="release",
        was="if #cast_by > 0 then cast_shadow(cast_by) end",
        now="",
    ),
    Mutant(
        "batch booking behind the reconcile cursor updates the shadow counters",
        seed=139,
        script="book",
        was="if passed and charge then cast_by[#cast_by + 1] = {charge, 1} end",
        now="",
    ),
    Mutant(
        "batch release behind the reconcile cursor updates the shadow counters",
        seed=618,
        script="release",
        was="if passed and group[11] then cast_by[#cast_by + 1] = {hold.charge, -1} end",
        now="",
    ),
    Mutant(
        "batch with existing tokens is booked frame by frame",
        seed=12,
        script="book",
        was="if #numbered > 0 or next(limited) then",
        now="if next(limited) then",
    ),
    Mutant(
        "batch with a capped job is booked frame by frame",
        seed=5,
        script="book",
        was="if #numbered > 0 or next(limited) then",
        now="if #numbered > 0 then",
    ),
    Mutant(
        "batch with a capped job is released frame by frame",
        seed=42,
        script="release",
        was="if group[11] and next(limited) then return {'limited'} end",
        now="",
    ),
    Mutant(
        "batch booking checks for capped jobs",
        seed=5,
        script="*",
        was="if string.find(name, '^job:') or string.find(name, '^layer:') then return true end",
        now="",
    ),
    Mutant(
        "each frame of a batch is charged to its own job",
        seed=8,
        script="*",
        was="group[8] .. group[11][nth] .. group[12]",
        now="group[8] .. group[11][1] .. group[12]",
    ),
    Mutant(
        "batch books no more frames than fit",
        script="book",
        was="if taken == fit then break end",
        now="",
    ),
    Mutant(
        "seeding writes the fence last",
        seed=0,
        script="seed",
        was="redis.call('HSET', show, 'seeding', whole(fence), 'run', run_id())",
        now="redis.call('HSET', show, 'seeding', whole(fence), 'run', run_id(), 'fence', whole(fence))",
    ),
    Mutant(
        "seeding writes the fence only while it is current",
        seed=683,
        script="seed",
        was="if held.seeding ~= fence then return {'newer'} end",
        now="",
    ),
    Mutant(
        "rows are counted only while the seeding is current",
        seed=5,
        script="book",
        was="if held.seeding ~= under and fence ~= under then return {'unseeded'} end",
        now="",
    ),
    Mutant(
        "unseeded show is not booked",
        seed=8,
        script="book",
        was="elseif not fence then\n  return {'unseeded'}",
        now="elseif not fence then\n  fence = tonumber(redis.call('HGET', show, 'seeding') or '1')",
    ),
    Mutant(
        "fence does not rise while a job is uncounted",
        seed=45,
        script="limits",
        was="redis.call('HEXISTS', show, 'uncounted') == 1",
        now="false",
    ),
    Mutant(
        "fence rises only with the change that raised it",
        seed=24,
        script="limits",
        was="how == 'push' and raised == fence and held.fence == fence - 1",
        now="held.fence == fence - 1",
    ),
    Mutant(
        "missed change blocks the fence",
        seed=24,
        script="limits",
        was="held.fence < fence and not own",
        now="false",
    ),
    Mutant(
        "show with a new ledger owner is seeded", seed=138, script="limits", was="held.fence < founded", now="false"
    ),
    Mutant(
        "token of an older fence is booked again",
        seed=298,
        script="book",
        was="since == fence and already or before",
        now="already",
    ),
    Mutant(
        "fence is bound to one run of the Redis server",
        seed=24,
        script="*",
        was="local here = held[2] and held[2] == run_id()",
        now="local here = true",
    ),
    Mutant("token is booked once", seed=0, script="book", was="if #numbered == 0 then", now="if true then"),
    Mutant(
        "cores are written with two decimals",
        seed=0,
        script="*",
        was="string.format('%.2f', number / 100)",
        now="string.format('%.1f', number / 100)",
    ),
    Mutant(
        "reconcile counts a bucket only at its cursor",
        seed=166,
        script="recount",
        was="held.recount ~= mark or held.recounter ~= recounter",
        now="false",
    ),
    Mutant(
        "counters are swapped only after all buckets are counted",
        seed=78,
        script="settle",
        was="held.recount ~= ENDED or held.recounter ~= recounter",
        now="false",
    ),
)

SERIES_MUTANTS = (
    Mutant(
        "carrier keeps its row until the others of its series have ended",
        seed=2,
        function="proc_end_carriers",
        was="        AND NOT EXISTS (SELECT FROM rota.proc f WHERE f.token >= c.series_first AND f.token < c.token)\n",
        now="",
    ),
    Mutant(
        "carrier that has ended goes with the last of its series",
        seed=3,
        function="proc_end_carriers",
        was="(c.b_ended OR c.token = ANY (ending))",
        now="c.token = ANY (ending)",
    ),
    Mutant(
        "ends of one series take turns",
        seed=5,
        function="proc_end",
        was="    PERFORM FROM rota.proc c WHERE c.token = ANY (carriers)",
        now="    PERFORM FROM rota.proc c WHERE false",
    ),
    Mutant(
        "no frame of a series is booked without its carrier",
        seed=5,
        function="proc_barred_series",
        was="  IF cardinality(carriers) = 0 THEN",
        now="  IF true THEN",
    ),
    Mutant(
        "carrier leaves a tombstone",
        seed=167,
        function="proc_end",
        was="gone := gone || freed.tokens;",
        now="gone := gone || ARRAY(SELECT t FROM unnest(freed.tokens) AS t WHERE t <> ALL (carriers));",
    ),
)
"""Rules about frames in series, which only the schedules with series can detect."""


def texts_of(mutant):
    """The scripts that the mutant changes, with their new texts."""
    for script in scripts():
        if mutant.script in ("*", script.name):
            assert mutant.was in script.text, f"{mutant.rule}: {script.name} has changed: update this mutant"
            yield script, script.text.replace(mutant.was, mutant.now)


def function_text(name):
    """The definition of a function in its source file."""
    source = "".join(file.read_text() for file in FUNCTIONS.iterdir())
    _, found, rest = source.partition(f"CREATE OR REPLACE FUNCTION rota.{name}(")
    assert found, f"there is no function {name}"
    body, _, _ = rest.partition("END $$;")
    return f"CREATE OR REPLACE FUNCTION rota.{name}({body}END $$;"


@asynccontextmanager
async def applied(mutant, connection):
    """Apply the mutant inside the block and restore the rule afterwards."""
    was = [(script, script.text, script.sha) for script in scripts()]
    try:
        if mutant.script:
            for script, text in list(texts_of(mutant)):
                script.text, script.sha = text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        if mutant.function:
            text = function_text(mutant.function)
            assert mutant.was in text, f"{mutant.rule}: {mutant.function} has changed: update this mutant"
            await connection.execute(text.replace(mutant.was, mutant.now))
        if mutant.drop:
            name, _, table = mutant.drop.partition(" ON ")
            await connection.execute(f"ALTER TABLE {table} DISABLE TRIGGER {name}")
        yield
    finally:
        for script, text, sha in was:
            script.text, script.sha = text, sha
        if mutant.function:
            await connection.execute(function_text(mutant.function))
        if mutant.drop:
            await connection.execute(f"ALTER TABLE {table} ENABLE TRIGGER {name}")
