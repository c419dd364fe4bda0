"""No answer of a healthy PostgreSQL or Redis counts as a crash of a service, whatever it was asked for.

`tests/unit/infra/test_error_reactions.py` lists the reaction to each answer; here a running replica gets them.
"""

from urllib.parse import urlsplit

import asyncpg
import pytest

from tests.support.harness.effort import effort
from tests.support.replica_and_worker import Farm, hanging
from tests.support.waiting import until

ANSWERS_MIN = 40
"""More than services may crash, all together."""
SQLSTATES = effort(
    ["55P03", "53100", "57P01"], ["55P03", "40P01", "57014", "53100", "53300", "57P01", "25006", "08006"]
)
REDIS_AWAY = [
    "LOADING Redis is loading the dataset in memory",
    "READONLY You can't write against a read only replica.",
    "OOM command not allowed when used memory > 'maxmemory'.",
    "BUSY Redis is busy running a script.",
    "MISCONF Redis is unable to persist to disk.",
    "CLUSTERDOWN The cluster is down",
    "MASTERDOWN Link with MASTER is down.",
]
REDIS_REFUSES = ["MOVED 3999 127.0.0.1:1", "NOPERM this user has no permissions to run this command"]
REDIS_ANSWERS = effort([REDIS_AWAY[2], REDIS_REFUSES[0]], [*REDIS_AWAY, *REDIS_REFUSES])
"""One of each class in the suite, all of them in `make soak`."""
FAULTS = """
CREATE TABLE public.fault (code text);
CREATE SEQUENCE public.raised;
CREATE FUNCTION public.raise_fault() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
  given text := (SELECT code FROM public.fault);
BEGIN
  IF given IS NOT NULL THEN
    PERFORM nextval('public.raised');
    RAISE EXCEPTION 'an answer of the test' USING ERRCODE = given;
  END IF;
  RETURN NULL;
END $$;
DO $$
DECLARE
  name regclass;
BEGIN
  FOR name IN SELECT oid FROM pg_class WHERE relnamespace = 'rota'::regnamespace AND relkind IN ('r', 'p') LOOP
    EXECUTE format('CREATE TRIGGER fault AFTER INSERT OR UPDATE OR DELETE ON %s'
                   ' FOR EACH STATEMENT EXECUTE FUNCTION public.raise_fault()', name);
  END LOOP;
END $$;
"""


def crashed(farm):
    """Services that have crashed, whether they were restarted or not."""
    return {each.name: repr(each.error) for each in farm.replica.supervisor.services if each._crashes}


@pytest.fixture
async def postgres_faults(database_url):
    """Sets the SQLSTATE that every write raises; counts those raised."""
    connection = await asyncpg.connect(database_url)
    await connection.execute(FAULTS)
    yield connection
    await connection.close()


@pytest.mark.parametrize("sqlstate", SQLSTATES)
async def test_answer_of_postgres_to_every_write_crashes_no_service(
    database_url, redis_url, nats_url, bus_prefix, postgres_faults, sqlstate
):
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as farm:
        await farm.show()
        await farm.worker(slots=4)
        gate = hanging("x")
        job = await farm.submit("hang", "x", frames=12)
        await farm.running("x", 4)
        await postgres_faults.execute("INSERT INTO public.fault VALUES ($1)", sqlstate)
        gate.set()

        async def many_raised():
            return await postgres_faults.fetchval("SELECT last_value FROM public.raised") >= ANSWERS_MIN

        await until(many_raised, within_s=30, what=f"many answers {sqlstate}")
        await postgres_faults.execute("DELETE FROM public.fault")
        assert await farm.ended(job, within_s=30) == "SUCCEEDED"
        assert crashed(farm) == {}
        await farm.quiet()


@pytest.mark.parametrize("answer", REDIS_ANSWERS, ids=lambda answer: answer.split()[0])
async def test_answer_of_redis_to_every_command_crashes_no_service(
    database_url, redis_url, nats_url, bus_prefix, proxy, answer
):
    at = urlsplit(redis_url)
    between = await proxy(at.hostname, at.port)
    async with Farm(database_url, between.url(redis_url), nats_url, bus_prefix) as farm:
        await farm.show()
        await farm.worker(slots=4)
        gate = hanging("x")
        job = await farm.submit("hang", "x", frames=12)
        await farm.running("x", 4)
        between.refuse(answer)
        gate.set()
        await until(lambda: between.refused >= ANSWERS_MIN, within_s=30, what=f"many answers {answer}")
        between.heal()
        assert await farm.ended(job, within_s=30) == "SUCCEEDED"
        assert crashed(farm) == {}
        await farm.quiet()
