"""Scripts on real servers: arguments and replies, loading under concurrent calls, errors."""

import asyncio
import itertools
import os
import re
from pathlib import Path

import msgspec
import pytest
import redis.asyncio
from structlog.testing import capture_logs

import rota
from rota.infra.redis import RedisTarget, Script, connect
from rota.infra.redis.script import EVALS
from rota.infra.redis.script_contract import parse_contract, render_lua
from rota.model.errors import LoginRefused, RedisUnavailable, ScriptFailed

NUMBERS = itertools.count()


class Done(msgspec.Struct, frozen=True):
    n: int


class Types(msgspec.Struct, frozen=True):
    names: tuple[str, ...]


class Echo(msgspec.Struct, frozen=True):
    total: int
    text: str
    raw: bytes
    half: float
    yes: bool
    rows: list[list[int | str]]


def counting():
    """A script that no server has loaded; it increments a key."""
    text = f"""\
-- script: counting
-- key counter string n
-- reply done n:int

-- {os.getpid()}-{next(NUMBERS)}
local n = redis.call('INCR', counter)
redis.call('PEXPIRE', counter, 60000)
return {{'done', n}}
"""
    return Script(text, "counting.lua", replies=Done)


async def loads(client, field="calls"):
    """How often the server got SCRIPT LOAD."""
    stats = await client.info("commandstats")
    return stats.get("cmdstat_script|load", stats.get("cmdstat_script", {})).get(field, 0)


async def refusals(client, code):
    """How often the server replied with this error."""
    return (await client.info("errorstats")).get(f"errorstat_{code}", {}).get("count", 0)


async def call_concurrently(run, client, callers=200):
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(run(client, counter="n")) for _ in range(callers)]
    return [call.result() for call in calls]


@pytest.fixture
async def private(private_redis):
    return await private_redis()


@pytest.fixture
async def client(private):
    async with connect(RedisTarget(url=private.url)) as client:
        yield client


async def test_script_locals_have_the_names_and_types_of_the_contract(redis):
    run = Script(
        """\
-- script: types
-- key one   string a
-- key rest* string b
-- arg n     int
-- arg x     float
-- arg b     bool
-- arg s     str
-- arg y     bytes
-- arg p     packed
-- arg list* int
-- reply types names:str*

return {'types', {type(one), type(rest), tostring(#rest), type(n), type(x), type(b), type(s), type(y), type(p),
  p.rows[2][1], type(list), type(list[1]), tostring(#list)}}
""",
        "types.lua",
        replies=Types,
    )
    given = {"one": "k", "rest": ["l", "m"], "n": 1, "x": 0.5, "b": False, "s": "s", "y": b"\0", "list": [1, 2, 3]}
    answer = await run(redis, **given, p={"rows": [["a"], ["b"]]})
    kinds = "string table 2 number number boolean string string table b table number 3"
    assert answer.names == tuple(kinds.split())


async def test_script_values_round_trip(redis):
    run = Script(
        """\
-- script: echo
-- arg numbers packed
-- arg text str
-- arg raw bytes
-- arg half float
-- arg yes bool
-- reply echo total:int text:str raw:bytes half:float yes:bool rows:packed

local total = 0
for _, n in ipairs(numbers) do total = total + n end
return {'echo', total, text, raw, tostring(half), yes and 1 or 0, cmsgpack.pack({{1, text}, {2, 'b'}})}
""",
        "echo.lua",
        replies=Echo,
    )
    answer = await run(redis, numbers=[2**52, 1, -5], text="naïve", raw=bytes(range(256)), half=-0.5, yes=True)
    assert answer == Echo(2**52 - 4, "naïve", bytes(range(256)), -0.5, True, [[1, "naïve"], [2, "b"]])


async def test_script_list_argument_may_exceed_the_lua_unpack_limit(redis):
    run = Script(
        "-- script: sum\n-- arg numbers* int\n-- reply done n:int\n"
        "local n = 0 for _, one in ipairs(numbers) do n = n + one end\nreturn {'done', n}",
        "sum.lua",
        replies=Done,
    )
    assert await run(redis, numbers=list(range(20_000))) == Done(sum(range(20_000)))


async def test_concurrent_calls_on_a_flushed_server_load_the_script_once(client):
    run = counting()
    await call_concurrently(run, client)  # opens every connection of the pool, so that the next calls arrive together
    await client.script_flush()
    await client.config_resetstat()
    answers = await call_concurrently(run, client)
    assert sorted(answer.n for answer in answers) == list(range(201, 401))
    assert await loads(client) == 1
    assert await refusals(client, "NOSCRIPT") > 10


async def test_call_of_a_loaded_script_does_not_load_again(client):
    run = counting()
    for _ in range(3):
        await run(client, counter="n")
    assert await loads(client) == 1


async def test_scripts_work_after_a_server_restart(client, private):
    run = counting()
    await run(client, counter="n")
    await private.kill()
    with pytest.raises(RedisUnavailable):
        await run(client, counter="n")
    await private.restart()
    assert await run(client, counter="n") == Done(1)


async def test_one_script_serves_two_servers(client, redis):
    run = counting()
    assert await run(redis, counter="n") == Done(1)
    assert await run(client, counter="n") == Done(1)
    assert await loads(client) == 1


async def test_refused_script_load_fails_all_waiting_callers_after_one_attempt(client, private):
    await client.execute_command("ACL", "SETUSER", "limited", "on", ">pw", "~*", "+@all", "-script")
    limited = connect(RedisTarget(url=re.sub(r"//:.*@", "//limited:pw@", private.url)))
    run = counting()
    async with limited:
        failures = await asyncio.gather(*(run(limited, counter="n") for _ in range(40)), return_exceptions=True)
    assert {type(failure) for failure in failures} == {LoginRefused}
    # A caller that finds the script missing after the attempt makes its own; without sharing there would be 40.
    assert await loads(client, "rejected_calls") <= 3
    assert await client.exists("n") == 0


class InterceptedRedis(redis.asyncio.Redis):
    """The real client with a hook around every command."""

    around = staticmethod(lambda command, send: send())

    async def execute_command(self, *args, **options):
        return await self.around(args[0], lambda: super(InterceptedRedis, self).execute_command(*args, **options))


async def test_server_that_forgets_a_script_at_once_gets_the_text_with_a_warning(client):
    async def forgetful(command, send):
        answer = await send()
        if command == "SCRIPT LOAD":
            await client.script_flush()
        return answer

    intercepted = InterceptedRedis.from_pool(client.connection_pool)
    intercepted.around = forgetful
    before = EVALS.labels("counting")._value.get()
    with capture_logs() as logs:
        assert await counting()(intercepted, counter="n") == Done(1)
    assert [entry["event"] for entry in logs if entry["log_level"] == "warning"] == ["redis_script_not_cached"]
    assert EVALS.labels("counting")._value.get() == before + 1


async def test_next_caller_loads_the_script_when_the_loading_one_is_cancelled(client):
    at_load = asyncio.Event()

    async def hanging_once(command, send):
        if command == "SCRIPT LOAD" and not at_load.is_set():
            at_load.set()
            await asyncio.Event().wait()
        return await send()

    intercepted = InterceptedRedis.from_pool(client.connection_pool)
    intercepted.around = hanging_once
    run = counting()
    async with asyncio.TaskGroup() as group:
        first = group.create_task(run(intercepted, counter="n"))
        await at_load.wait()
        others = [group.create_task(run(intercepted, counter="n")) for _ in range(5)]
        await asyncio.sleep(0)
        first.cancel()
    assert sorted(other.result().n for other in others) == [1, 2, 3, 4, 5]
    assert await loads(client) == 1


def failing(body):
    return Script(f"-- script: failing\n-- reply done n:int\n{body}", "failing.lua", replies=Done)


async def test_script_error_reply_raises_script_failed_with_its_code(redis):
    with pytest.raises(ScriptFailed, match="The Redis script failing failed: the books are shut") as failed:
        await failing("return redis.error_reply('SHUT the books are shut')")(redis)
    assert failed.value.facts == {"script": "failing", "word": "SHUT"}


async def test_lua_error_names_the_line_of_the_file(redis):
    with pytest.raises(ScriptFailed, match=r"user_script:5:.*boom"):
        await failing("\n\nerror('boom')")(redis)


async def test_wrong_redis_type_raises_script_failed(redis):
    await redis.lpush("n", 1)
    await redis.pexpire("n", 60_000)
    with pytest.raises(ScriptFailed, match="wrong kind of value"):
        await counting()(redis, counter="n")


async def test_all_rota_scripts_compile_on_this_server(redis):
    for file in sorted(Path(rota.__file__).parent.rglob("*.lua")):
        text = file.read_text()
        if text.startswith("-- script:"):
            header = parse_contract(text, str(file))
            libraries = [file.with_name(f"{name}.lua").read_text() for name in header.uses]
            await redis.script_load(render_lua(header, text, libraries))
