"""Maps failures of asyncpg to Rota's errors, by what the caller can do.

| failure | error | reaction (`rota.model.error_reactions`) |
|---|---|---|
| the server cannot be reached, ends the session, or has become a standby | `PostgresUnavailable` | back off |
| it lacks disk space, memory or connections (`EXHAUSTED_ERRORS`) | `PostgresUnavailable` | back off |
| this statement met a lock, a timeout or a deadlock (`BUSY_ERRORS`) | `PostgresBusy` | retry |
| login, database or URL are wrong | `LoginRefused`, `InvalidSetting` | refuse |
| any other answer: a violated constraint, a bug | asyncpg's own | handled by the caller, or a bug |

The fact `outcome` of `PostgresUnavailable` says what is known: "not_sent" and "rolled_back" mean that nothing took
effect, so a retry is safe; "unknown" means that a statement or COMMIT was in flight and may have taken effect. This
package never retries: only the caller knows whether the operation is idempotent and how to check.
"""

from __future__ import annotations

import os

import asyncpg

from rota.infra.postgres.target import PostgresTarget
from rota.model.errors import InvalidSetting, LoginRefused, PostgresBusy, PostgresUnavailable, RotaError

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
    asyncpg.InvalidCachedStatementError,
)
"""Lock and statement timeouts, deadlocks, serialization failures, a table changed by an upgrade: other work goes on."""
EXHAUSTED_ERRORS = (asyncpg.InsufficientResourcesError, asyncpg.PostgresSystemError)
"""No memory, disk space or connection left, or a failing disk: every statement may fail, not only this one."""
_SESSION_ENDS = ("FATAL", "PANIC")
"""Severities after which the server closes the connection, such as that of an idle transaction."""
STANDBY_ERRORS = (asyncpg.ReadOnlySQLTransactionError,)
"""After a failover the old primary may go on as a standby, with our connections."""


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
    """The error to raise when the connection was lost during a statement; None: the answer is the caller's."""
    if not is_connection_lost(error, closed=closed):
        return _not_now(error, target)
    return _connection_lost(
        "during a statement", "it may or may not have taken effect; check before repeating it", "unknown", error, target
    )


def on_transaction(error: BaseException, target: PostgresTarget, *, closed: bool) -> PostgresUnavailable | None:
    """As `on_statement`, inside a transaction: the server rolls it back, so nothing took effect."""
    if not is_connection_lost(error, closed=closed):
        return _not_now(error, target)
    return _connection_lost("during a transaction", "nothing took effect; try again", "rolled_back", error, target)


def on_commit(error: BaseException, target: PostgresTarget, *, closed: bool) -> PostgresUnavailable | None:
    """As `on_statement`, for a COMMIT: if the connection was lost, its outcome is unknown."""
    if not is_connection_lost(error, closed=closed):
        return _not_now(error, target)
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
    if isinstance(error, CONNECTION_LOST_ERRORS) or getattr(error, "severity_en", None) in _SESSION_ENDS:
        return True
    return closed and isinstance(error, FAILURES)


def _not_now(error: BaseException, target: PostgresTarget) -> PostgresUnavailable | None:
    address = target.address
    if isinstance(error, STANDBY_ERRORS):
        return PostgresUnavailable(
            f"PostgreSQL at {address} is read-only: point the PostgreSQL URL at the primary.",
            address=address,
            outcome="rolled_back",
        )
    sentence = f"PostgreSQL at {address} cannot do this now ({error}): nothing took effect; try again."
    facts = {"address": address, "outcome": "rolled_back", "sqlstate": getattr(error, "sqlstate", "")}
    if isinstance(error, BUSY_ERRORS):
        return PostgresBusy(sentence, **facts)
    return PostgresUnavailable(sentence, **facts) if isinstance(error, EXHAUSTED_ERRORS) else None


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
