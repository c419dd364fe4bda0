"""The books with one rule taken away, each in its own way: an explorer that does not notice is no proof of anything.

A mutant changes the text of a script (for as long as a test runs) or of a function in the test's own database.
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
    """What no longer holds."""
    script: str = ""
    """The script it is taken from; `*` for the library they all share."""
    function: str = ""
    was: str = ""
    now: str = ""
    drop: str = ""
    """A trigger that is dropped, on a table."""
    seed: int = 0
    """A schedule that notices; should it no longer, the first ones are tried, too."""


MUTANTS = (
    Mutant("an insert asks for the fence", seed=1, function="proc_insert", was=" OR held.int_fence <> fence", now=""),
    Mutant(
        "an insert looks at the graves",
        seed=109,
        function="proc_insert",
        was="EXIT WHEN NOT EXISTS (SELECT FROM rota.proc_buried(of_show, runs) AS b WHERE b.token <> ALL (left_out));",
        now="EXIT;",
    ),
    Mutant(
        "a deleted row leaves a grave",
        seed=109,
        function="proc_delete",
        was="PERFORM rota.proc_dig(of_show, fence, firsts, lasts);",
        now="",
    ),
    Mutant(
        "flag and fence are read after the lock",
        seed=9,
        function="show_shared",
        was="""  PERFORM pg_advisory_xact_lock_shared(1633903476, rota.show_lock_number(of_show));
  SELECT * INTO held FROM rota.show WHERE pk_show = of_show;
""",
        now="""  SELECT * INTO held FROM rota.show WHERE pk_show = of_show;
  PERFORM pg_advisory_xact_lock_shared(1633903476, rota.show_lock_number(of_show));
""",
    ),
    Mutant("a lowered cap raises the fence", seed=0, drop="lowered ON rota.subscription"),
    Mutant(
        "a release passes over what was booked since",
        seed=769,
        script="release",
        was="standing_fence > fence",
        now="false",
    ),
    Mutant(
        "what is given back was booked under that fence",
        seed=113,
        script="release",
        was="(booked == 0 or hold.since == booked)",
        now="true",
    ),
    Mutant(
        "a booking behind the mark is in the shadow",
        seed=84,
        script="book",
        was="if #cast_by > 0 then cast_shadow(cast_by) end",
        now="",
    ),
    Mutant(
        "a release behind the mark is in the shadow",
        seed=13,
        script="release",
        was="if #cast_by > 0 then cast_shadow(cast_by) end",
        now="",
    ),
    Mutant(
        "a swarm that is booked behind the mark is in the shadow",
        seed=139,
        script="book",
        was="if passed and charge then cast_by[#cast_by + 1] = {charge, 1} end",
        now="",
    ),
    Mutant(
        "a swarm that is released behind the mark is in the shadow",
        seed=618,
        script="release",
        was="if passed and group[11] then cast_by[#cast_by + 1] = {hold.charge, -1} end",
        now="",
    ),
    Mutant(
        "a swarm of which tokens are there is asked one by one",
        seed=12,
        script="book",
        was="if #numbered > 0 or next(limited) then",
        now="if next(limited) then",
    ),
    Mutant(
        "a swarm of which a job has limits is asked one by one",
        seed=5,
        script="book",
        was="if #numbered > 0 or next(limited) then",
        now="if #numbered > 0 then",
    ),
    Mutant(
        "a swarm of which a job has limits is released one by one",
        seed=42,
        script="release",
        was="if group[11] and next(limited) then return {'limited'} end",
        now="",
    ),
    Mutant(
        "whether any job has limits is looked up for a swarm",
        seed=5,
        script="*",
        was="if string.find(name, '^job:') or string.find(name, '^layer:') then return true end",
        now="",
    ),
    Mutant(
        "each frame of a swarm has the charge of its own job",
        seed=8,
        script="*",
        was="group[8] .. group[11][nth] .. group[12]",
        now="group[8] .. group[11][1] .. group[12]",
    ),
    Mutant(
        "a swarm takes no more than fits",
        script="book",
        was="if taken == fit then break end",
        now="",
    ),
    Mutant(
        "a seeding writes the fence last",
        seed=0,
        script="seed",
        was="redis.call('HSET', show, 'seeding', whole(fence), 'run', run_id())",
        now="redis.call('HSET', show, 'seeding', whole(fence), 'run', run_id(), 'fence', whole(fence))",
    ),
    Mutant(
        "the fence is written only while the mark of the seeding stands",
        seed=683,
        script="seed",
        was="if held.seeding ~= fence then return {'newer'} end",
        now="",
    ),
    Mutant(
        "rows are counted only while the mark of the seeding stands",
        seed=5,
        script="book",
        was="if held.seeding ~= under and fence ~= under then return {'unseeded'} end",
        now="",
    ),
    Mutant(
        "an unseeded show is not booked",
        seed=8,
        script="book",
        was="elseif not fence then\n  return {'unseeded'}",
        now="elseif not fence then\n  fence = tonumber(redis.call('HGET', show, 'seeding') or '1')",
    ),
    Mutant(
        "the fence does not rise over a job that was never counted",
        seed=45,
        script="limits",
        was="redis.call('HEXISTS', show, 'uncounted') == 1",
        now="false",
    ),
    Mutant(
        "a fence comes with the change that raised it",
        seed=24,
        script="limits",
        was="how == 'push' and raised == fence and held.fence == fence - 1",
        now="held.fence == fence - 1",
    ),
    Mutant(
        "a change that was missed holds the fence back",
        seed=24,
        script="limits",
        was="held.fence < fence and not own",
        now="false",
    ),
    Mutant("a show that changed hands is seeded", seed=138, script="limits", was="held.fence < founded", now="false"),
    Mutant(
        "a token of an older fence is booked anew",
        seed=298,
        script="book",
        was="since == fence and already or before",
        now="already",
    ),
    Mutant(
        "the fence belongs to one run of the server",
        seed=24,
        script="*",
        was="local here = held[2] and held[2] == run_id()",
        now="local here = true",
    ),
    Mutant("a token is booked once", seed=0, script="book", was="if #numbered == 0 then", now="if true then"),
    Mutant(
        "hundredths of a core are written",
        seed=0,
        script="*",
        was="string.format('%.2f', number / 100)",
        now="string.format('%.1f', number / 100)",
    ),
    Mutant(
        "a bucket joins the shadow from its mark alone",
        seed=166,
        script="recount",
        was="held.recount ~= mark or held.recounter ~= recounter",
        now="false",
    ),
    Mutant(
        "counters are swapped when all buckets are counted",
        seed=78,
        script="settle",
        was="held.recount ~= ENDED or held.recounter ~= recounter",
        now="false",
    ),
)


def texts_of(mutant):
    """The scripts it changes, with what they become."""
    for script in scripts():
        if mutant.script in ("*", script.name):
            assert mutant.was in script.text, f"{mutant.rule}: {script.name} has changed, and this mutant with it"
            yield script, script.text.replace(mutant.was, mutant.now)


def function_text(name):
    """The definition of a function as its file has it."""
    source = "".join(file.read_text() for file in FUNCTIONS.iterdir())
    _, found, rest = source.partition(f"CREATE OR REPLACE FUNCTION rota.{name}(")
    assert found, f"there is no function {name}"
    body, _, _ = rest.partition("END $$;")
    return f"CREATE OR REPLACE FUNCTION rota.{name}({body}END $$;"


@asynccontextmanager
async def applied(mutant, connection):
    """The rule is gone inside, and back afterwards."""
    was = [(script, script.text, script.sha) for script in scripts()]
    try:
        if mutant.script:
            for script, text in list(texts_of(mutant)):
                script.text, script.sha = text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        if mutant.function:
            text = function_text(mutant.function)
            assert mutant.was in text, f"{mutant.rule}: {mutant.function} has changed, and this mutant with it"
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
