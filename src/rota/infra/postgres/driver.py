"""Opens and closes connections: the only caller of asyncpg's `connect`."""

from __future__ import annotations

from typing import TypeAlias

import asyncpg

from rota.infra.postgres import failures
from rota.infra.postgres.target import PostgresTarget
from rota.model.urls import validate_url

# A string, because asyncpg's classes are generic only for the type checker.
Record: TypeAlias = asyncpg.Record
Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

# Statements live in files, so their number is small: all of them stay prepared for the life of a connection.
PREPARED_STATEMENTS_MAX = 512


async def connect(target: PostgresTarget) -> Connection:
    """A connection with Rota's session settings; raises `PostgresUnavailable`, `LoginRefused` or `InvalidSetting`."""
    try:
        return await asyncpg.connect(
            validate_url(target.url),
            timeout=target.connect_timeout_s,
            command_timeout=target.command_timeout_s,
            statement_cache_size=PREPARED_STATEMENTS_MAX,
            max_cached_statement_lifetime=0,
            server_settings=target.server_settings(),
        )
    except (*failures.FAILURES, ValueError) as error:
        raise failures.on_connect(error, target) from None


async def close_connection(connection: Connection, within_s: float = 2.0) -> None:
    """Close gracefully, so that the server logs no lost client; terminate on no answer."""
    try:
        await connection.close(timeout=within_s)
    except failures.FAILURES:
        connection.terminate()
