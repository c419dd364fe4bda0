"""What a failure on the way to PostgreSQL means, in Rota's own errors.

Only what concerns reaching the server is translated. An answer of the server stays asyncpg's error, so that callers
can tell a statement timeout (`QueryCanceledError`), a lock timeout (`LockNotAvailableError`), a serialization failure
(`SerializationError`), a deadlock (`DeadlockDetectedError`) and a violated constraint from each other.

The fact `outcome` of `PostgresUnavailable` says what is known: "not_sent" and "rolled_back" mean that nothing took
effect and the call may simply be made again; "unknown" means that a statement or a COMMIT was on its way, so it may
have taken effect. Nobody here retries: only the caller knows whether doing it twice is harmless, and how to find out.
"""

from __future__ import annotations

import os

import asyncpg

from rota.infra.postgres.target import PostgresTarget
from rota.model.errors import InvalidSetting, LoginRefused, PostgresUnavailable, RotaError

CONNECTION_LOST_ERRORS = (
    OSError,
    TimeoutError,
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
    # What asyncpg makes of a statement on a connection that the server is just ending.
    asyncpg.InternalClientError,
)
SERVER_ERRORS = (asyncpg.PostgresError,)
# What a statement can raise when the server is the cause and not the program.
FAILURES = (*CONNECTION_LOST_ERRORS, *SERVER_ERRORS, asyncpg.InterfaceError)


def on_connect(error: BaseException, target: PostgresTarget) -> RotaError:
    """The error to raise when no connection came about."""
    address = target.address
    match error:
        case asyncpg.InvalidPasswordError() | asyncpg.InvalidAuthorizationSpecificationError():
            return LoginRefused(
                f"PostgreSQL at {address} refused the login: check user and password in the PostgreSQL URL, and its"
                " pg_hba.conf.",
                address=address,
            )
        case asyncpg.InvalidCatalogNameError():
            return LoginRefused(
                f"PostgreSQL at {address} has no such database: create it, or correct the PostgreSQL URL.",
                address=address,
            )
        case asyncpg.InsufficientPrivilegeError():
            return LoginRefused(
                f"PostgreSQL at {address} does not let this user connect: grant CONNECT on the database to it.",
                address=address,
            )
        case asyncpg.TooManyConnectionsError():
            return PostgresUnavailable(
                f"PostgreSQL at {address} has no connection left: lower pool sizes or raise its max_connections.",
                address=address,
                outcome="not_sent",
            )
        case asyncpg.ClientConfigurationError() | ValueError():
            return InvalidSetting(
                "The PostgreSQL URL cannot be read: write it as postgresql://user:password@host:port/database, with"
                " special characters of the password percent-encoded."
            )
    return PostgresUnavailable(
        f"PostgreSQL at {address} cannot be reached ({cause(error)}): check that it runs and that the PostgreSQL URL"
        " is right.",
        address=address,
        outcome="not_sent",
    )


def on_statement(error: BaseException, target: PostgresTarget, *, closed: bool) -> PostgresUnavailable | None:
    """The error to raise when the connection was lost under a statement, or None when the server answered."""
    if not is_connection_lost(error, closed=closed):
        return None
    return _connection_lost(
        "during a statement", "it may or may not have taken effect; look before repeating it", "unknown", error, target
    )


def on_transaction(error: BaseException, target: PostgresTarget, *, closed: bool) -> PostgresUnavailable | None:
    """The same inside a transaction: the server rolls it back, so nothing took effect."""
    if not is_connection_lost(error, closed=closed):
        return None
    return _connection_lost(
        "during a transaction", "nothing of it took effect; try again", "rolled_back", error, target
    )


def on_commit(error: BaseException, target: PostgresTarget, *, closed: bool) -> PostgresUnavailable | None:
    """The error to raise when nobody can say whether a COMMIT happened, or None when the server refused it."""
    if not is_connection_lost(error, closed=closed):
        return None
    return _connection_lost(
        "before it confirmed a COMMIT",
        "the transaction may or may not have taken effect; look before repeating it",
        "unknown",
        error,
        target,
    )


def stopping_error(target: PostgresTarget) -> PostgresUnavailable:
    """The error to raise to whoever comes while everything is being closed."""
    return PostgresUnavailable(
        "The connections to PostgreSQL are closed, because this process is stopping.",
        address=target.address,
        outcome="not_sent",
    )


def is_connection_lost(error: BaseException, *, closed: bool) -> bool:
    return isinstance(error, CONNECTION_LOST_ERRORS) or (closed and isinstance(error, FAILURES))


def _connection_lost(
    when: str, then: str, outcome: str, error: BaseException, target: PostgresTarget
) -> PostgresUnavailable:
    return PostgresUnavailable(
        f"PostgreSQL at {target.address} was lost {when} ({cause(error)}): {then}.",
        address=target.address,
        outcome=outcome,
    )


def cause(error: BaseException) -> str:
    """A short reason without the server's address: messages of the network layers may repeat whole URLs."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return type(error).__name__
