"""Principals and their API keys: storage, and authentication of requests.

    keys = ApiKeyStore(database)                            # create, list, revoke
    issued = await keys.create("ci", [GrantSpec(Role.SUBMITTER, "film")], actor="cli:ann")

    key_check = KeyCheck(database)                          # one per process; supervise `key_check.services()`
    actor = await key_check.check(key_from_headers(authorization, api_key))
    require_role(actor, Role.VIEWER, "film")

principals  `PrincipalStore`: create, list and disable principals
keys        `ApiKeyStore`: create, list and revoke keys
check       `KeyCheck`: authenticate a key, with a short cache
uses        `KeyUseRecorder`: last-used times, written in batches

Invariants and who enforces them:
- A secret is shown once and never stored: `ApiKeyStore.create` returns it; tables and the audit log hold its digest or
  nothing.
- Every key belongs to a principal, whose name is never changed or given to another: unique index, triggers.
- Every change and its audit entry are one transaction: `keys`, `principals`.
- `rota.model.access` decides what an actor may do, from the grants that `KeyCheck` loaded.
- Only PostgreSQL's clock decides about expiry.
- Every process refuses a revoked key, and the keys of a disabled principal, within a second: NOTIFY clears its cache,
  and an entry lives at most `check.CACHE_TTL_S` if the notification is lost.

If the reply to `create` is lost, the key exists and its secret does not: it is listed as never used; revoke it.
"""

from rota.server.access.check import KeyCheck
from rota.server.access.keys import ApiKey, ApiKeyStore, IssuedApiKey, NewPrincipal
from rota.server.access.principals import PrincipalStore

__all__ = ["ApiKey", "ApiKeyStore", "IssuedApiKey", "KeyCheck", "NewPrincipal", "PrincipalStore"]
