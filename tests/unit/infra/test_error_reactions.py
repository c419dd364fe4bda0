"""Answers of PostgreSQL, Redis and NATS, each with the reaction of every service to it."""

import asyncpg
import pytest
from nats import errors as nats_errors
from redis._parsers.base import BaseParser
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError
from redis.exceptions import TimeoutError as RedisTimeoutError

from rota.infra.nats import failures as nats
from rota.infra.postgres import PostgresTarget
from rota.infra.postgres import failures as postgres
from rota.infra.redis import RedisTarget, connect
from rota.infra.redis import failures as redis
from rota.model.error_reactions import Reaction, is_outage, is_transient, reaction_to
from rota.model.errors import (
    BreakerOpen,
    EvictingRedis,
    InvalidInput,
    LeaseLost,
    NatsUnavailable,
    PostgresBusy,
    PostgresUnavailable,
    ScriptFailed,
    TooLarge,
)

RETRY, BACK_OFF, REFUSE, BUG = Reaction
POSTGRES = PostgresTarget(url="postgresql://rota@127.0.0.1:5432/rota")


def postgres_answer(sqlstate, severity="ERROR"):
    return asyncpg.PostgresError.new({"S": severity, "V": severity, "C": sqlstate, "M": "an answer"})


@pytest.mark.parametrize(
    ("sqlstate", "reaction"),
    [
        ("55P03", RETRY),  # lock timeout
        ("40P01", RETRY),  # deadlock
        ("40001", RETRY),  # serialization failure
        ("57014", RETRY),  # statement timeout, or cancelled by an operator
        ("53000", BACK_OFF),
        ("53100", BACK_OFF),  # disk full
        ("53200", BACK_OFF),  # out of memory
        ("53300", BACK_OFF),  # too many connections
        ("58030", BACK_OFF),  # the disk fails
        ("57P01", BACK_OFF),  # shut down by an operator
        ("57P02", BACK_OFF),  # crashed
        ("57P03", BACK_OFF),  # starting up
        ("25006", BACK_OFF),  # read-only: a standby
        ("08000", BACK_OFF),
        ("08003", BACK_OFF),
        ("08006", BACK_OFF),
        ("08P01", BACK_OFF),
        ("23505", BUG),  # a constraint that the caller did not expect
        ("42P01", BUG),
        ("P0001", BUG),
        ("XX000", BUG),
    ],
)
@pytest.mark.parametrize("when", [postgres.on_statement, postgres.on_transaction, postgres.on_commit])
def test_answer_of_postgres_has_a_reaction(sqlstate, reaction, when):
    answer = postgres_answer(sqlstate)
    assert reaction_to(when(answer, POSTGRES, closed=False) or answer) is reaction


@pytest.mark.parametrize("sqlstate", ["25P03", "25P04", "57P04", "57P05", "XX000"])
def test_answer_of_postgres_that_ends_the_session_is_an_outage(sqlstate):
    """25P03 ends a transaction that was idle for too long, as that of a paused process."""
    translated = postgres.on_transaction(postgres_answer(sqlstate, "FATAL"), POSTGRES, closed=False)
    assert (type(translated), translated.facts["outcome"]) == (PostgresUnavailable, "rolled_back")


def test_statement_on_a_table_changed_by_an_upgrade_is_retried():
    fields = {"S": "ERROR", "V": "ERROR", "C": "0A000", "M": "cached plan", "R": "RevalidateCachedQuery"}
    answer = asyncpg.PostgresError.new(fields)
    assert reaction_to(postgres.on_transaction(answer, POSTGRES, closed=False)) is RETRY


@pytest.mark.parametrize(
    ("sqlstate", "reaction"), [("28P01", REFUSE), ("3D000", REFUSE), ("53300", BACK_OFF), ("57P03", BACK_OFF)]
)
def test_answer_of_postgres_to_a_login_has_a_reaction(sqlstate, reaction):
    assert reaction_to(postgres.on_connect(postgres_answer(sqlstate, "FATAL"), POSTGRES)) is reaction


@pytest.fixture
def client():
    return connect(RedisTarget(url="redis://127.0.0.1:6379/0"))


@pytest.mark.parametrize(
    ("answer", "reaction"),
    [
        ("LOADING Redis is loading the dataset in memory", BACK_OFF),
        ("READONLY You can't write against a read only replica.", BACK_OFF),
        ("OOM command not allowed when used memory > 'maxmemory'.", BACK_OFF),
        ("BUSY Redis is busy running a script. You can only call SCRIPT KILL.", BACK_OFF),
        ("MISCONF Redis is configured to save RDB snapshots, but it's unable to persist to disk.", BACK_OFF),
        ("NOREPLICAS Not enough good replicas to write.", BACK_OFF),
        ("CLUSTERDOWN The cluster is down", BACK_OFF),
        ("MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.", BACK_OFF),
        ("TRYAGAIN Multiple keys request during rehashing of slot", BACK_OFF),
        ("ASK 3999 127.0.0.1:6381", BACK_OFF),
        ("ERR max number of clients reached", BACK_OFF),
        ("ERR Error running script (call to f_1): @user_script:1: @user_script: 1: -OOM command not allowed", BACK_OFF),
        ("ERR Error running script (call to f_1): @user_script:1: @user_script: 1: -READONLY You can't", BACK_OFF),
        ("MOVED 3999 127.0.0.1:6381", REFUSE),
        ("CROSSSLOT Keys in request don't hash to the same slot", REFUSE),
        ("WRONGPASS invalid username-password pair or user is disabled.", REFUSE),
        ("NOAUTH Authentication required.", REFUSE),
        ("NOPERM this user has no permissions to run the 'evalsha' command", REFUSE),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", BUG),
        ("ERR unknown command 'FOO'", BUG),
        ("ERR Error running script (call to f_1): @user_script:1: attempt to index a nil value", BUG),
    ],
    ids=lambda value: value.split()[0] if " " in str(value) else None,
)
def test_answer_of_redis_has_a_reaction(client, answer, reaction):
    error = BaseParser.parse_error(answer)
    assert reaction_to(redis.to_rota_error(error, client) or error) is reaction


def test_redis_answer_in_a_pipeline_has_the_reaction_of_the_answer_alone(client):
    error = BaseParser.parse_error("MISCONF unable to persist to disk")
    error.args = ("Command # 2 (SET a b) of pipeline caused error: MISCONF unable to persist to disk",)
    assert is_outage(redis.to_rota_error(error, client))


def test_missing_script_is_left_to_the_caller_that_loads_it(client):
    error = BaseParser.parse_error("NOSCRIPT No matching script. Please use EVAL.")
    assert isinstance(error, NoScriptError)
    assert redis.to_rota_error(error, client) is None


@pytest.mark.parametrize("error", [RedisConnectionError("closed"), RedisTimeoutError("slow"), ConnectionResetError()])
def test_silent_redis_is_an_outage(client, error):
    assert is_outage(redis.to_rota_error(error, client))


@pytest.mark.parametrize(
    ("error", "reaction"),
    [
        (nats_errors.NoRespondersError(), BACK_OFF),
        (nats_errors.TimeoutError(), BACK_OFF),
        (nats_errors.ConnectionClosedError(), BACK_OFF),
        (nats_errors.ConnectionReconnectingError(), BACK_OFF),
        (nats_errors.StaleConnectionError(), BACK_OFF),
        (nats_errors.OutboundBufferLimitError(), BACK_OFF),
        (nats_errors.FlushTimeoutError(), BACK_OFF),
        (nats_errors.NoServersError(), BACK_OFF),
        (nats_errors.Error("nats: 'Permissions Violation for Publish'"), BACK_OFF),
        (ConnectionResetError(), BACK_OFF),
        (nats_errors.MaxPayloadError(), REFUSE),
        (nats_errors.BadSubjectError(), BUG),
    ],
    ids=lambda value: type(value).__name__,
)
def test_failure_of_nats_has_a_reaction(error, reaction):
    assert reaction_to(nats.to_rota_error(error, "does not answer", "127.0.0.1:4222") or error) is reaction


@pytest.mark.parametrize(
    ("code", "err_code", "reaction"),
    [
        (503, 10008, BACK_OFF),  # JetStream is temporarily unavailable
        (503, 10023, BACK_OFF),  # insufficient resources
        (503, 10077, BACK_OFF),  # the stream has its maximum of messages or bytes
        (503, 10076, BACK_OFF),  # JetStream was turned off, such as by a full disk
        (500, 10009, BACK_OFF),  # no leader
        (500, 10028, BACK_OFF),  # insufficient memory
        (500, 10047, BACK_OFF),  # insufficient storage
        (500, 10118, BACK_OFF),  # the stream is offline
        (500, 10012, BACK_OFF),  # a consumer could not be created, such as on a full disk
        (429, 10167, BACK_OFF),  # too many requests
        (400, 10002, BACK_OFF),  # resources of the account
        (400, 10005, BACK_OFF),  # no peers for a replica
        (400, 10026, BACK_OFF),  # consumers
        (500, 10052, REFUSE),  # invalid configuration
        (500, 10074, REFUSE),  # more replicas than servers
        (503, 10010, REFUSE),  # not a cluster
        (400, 10003, REFUSE),
        (400, 10065, REFUSE),  # subjects overlap
        (404, 10014, REFUSE),
        (404, 10059, REFUSE),
    ],
)
def test_answer_of_jetstream_has_a_reaction(code, err_code, reaction):
    answer = nats.ApiError(code, err_code, "an answer")
    assert reaction_to(nats.on_api_error(answer, "it failed", "127.0.0.1:4222")) is reaction


@pytest.mark.parametrize(
    ("error", "reaction"),
    [
        (PostgresBusy("lock timeout"), RETRY),
        (BreakerOpen("open"), BACK_OFF),
        (InvalidInput("wrong"), REFUSE),
        (TooLarge("more than fits"), REFUSE),
        (EvictingRedis("may evict"), REFUSE),
        (LeaseLost("expired"), REFUSE),
        (ScriptFailed("nil"), BUG),
        (LookupError("bug"), BUG),
        (ExceptionGroup("both", [PostgresBusy("a"), PostgresBusy("b")]), RETRY),
        (ExceptionGroup("both", [PostgresBusy("a"), NatsUnavailable("b")]), BACK_OFF),
        (ExceptionGroup("both", [NatsUnavailable("a"), ExceptionGroup("in", [LookupError("b")])]), BUG),
    ],
    ids=repr,
)
def test_error_has_the_reaction_of_its_most_severe_cause(error, reaction):
    assert reaction_to(error) is reaction
    assert is_outage(error) is (reaction is BACK_OFF)
    assert is_transient(error) is (reaction in (RETRY, BACK_OFF))
