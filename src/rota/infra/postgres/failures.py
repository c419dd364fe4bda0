"""Maps connection failures of asyncpg to Rota's errors.

Only failures to reach the server are translated. Errors that the server answered remain asyncpg's, so that callers can
distinguish a statement timeout (`QueryCanceledError`), a lock timeout (`LockNotAvailableError`), a serialization
failure (`SerializationError`), a deadlock (`DeadlockDetectedError`) and a violated constraint.

The fact `outcome` of `PostgresUnavailable` says what is known: "not_sent" and "rolled_back" mean that nothing took
effect, so a retry is safe; "unknown" means that a statement or COMMIT was in flight and may have taken effect. This
package never retries: only the caller knows whether the operation is idempotent and how to check.
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
    # asyncpg raises this for a statement on a connection that the server is closing.
    asyncpg.InternalClientError,
)
SERVER_ERRORS = (asyncpg.PostgresError,)
# Everything a statement can raise because of the server rather than a bug.
FAILURES = (*CONNECTION_LOST_ERRORS, *SERVER_ERRORS, asyncpg.InterfaceError)
BUSY_ERRORS = (
    asyncpg.LockNotAvailableError,
    asyncpg.QueryCanceledError,
    asyncpg.TransactionRollbackError,
    asyncpg.InsufficientResourcesError,
)
"""Errors of a server that lacks time or resources at the moment."""


def on_connect(error: BaseException, target: PostgresTarget) -> RotaError:
    """The error to raise when connecting failed."""
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
    """The error to raise when the connection was lost during a statement, or None when the server answered."""
    if not is_connection_lost(error, closed=closed):
        return None
    return _connection_lost(
        "during a statement", "it may or may not have taken effect; check before repeating it", "unknown", error, target
    )


def on_transaction(error: BaseException, target: PostgresTarget, *, closed: bool) -> PostgresUnavailable | None:
    """As `on_statement`, inside a transaction: the server rolls it back, so nothing took effect."""
    if not is_connection_lost(error, closed=closed):
        return None
    return _connection_lost("during a transaction", "nothing took effect; try again", "rolled_back", error, target)


def on_commit(error: BaseException, target: PostgresTarget, *, closed: bool) -> PostgresUnavailable | None:
    """The error to raise when the outcome of a COMMIT is unknown, or None when the server refused it."""
    if not is_connection_lost(error, closed=closed):
        return None
    return _connection_lost(
        "before it confirmed a COMMIT",
        "the transaction may or may not have taken effect; check before repeating it",
        "unknown",
        error,
        target,
    )


def stopping_error(target: PostgresTarget) -> PostgresUnavailable:
    """The error for calls made during or after close."""
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
    """A short reason without the server's address: messages of the network layers may contain whole URLs."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return type(error).__name__
