"""API keys: storage, and authentication of requests.

    keys = ApiKeyStore(database)                            # create, list, revoke
    issued = await keys.create("ci", [GrantSpec(Role.SUBMITTER, "film")], actor="cli:ann")

    key_check = KeyCheck(database)                          # one per process; supervise `key_check.services()`
    actor = await key_check.check(key_from_headers(authorization, api_key))
    require_role(actor, Role.VIEWER, "film")

keys     `ApiKeyStore`: create, list and revoke keys
check    `KeyCheck`: authenticate a key, with a short cache
uses     `KeyUseRecorder`: last-used times, written in batches

Invariants and who enforces them:
- A secret is shown once and never stored: `ApiKeyStore.create` returns it; tables and the audit log hold its digest or
  nothing.
- Every change and its audit entry are one transaction: `keys`.
- `rota.model.access` decides what an actor may do, from the grants that `KeyCheck` loaded.
- Only PostgreSQL's clock decides about expiry.
- Every process refuses a revoked key within a second: NOTIFY clears its cache, and an entry lives at most
  `check.CACHE_TTL_S` if the notification is lost.

If the reply to `create` is lost, the key exists and its secret does not: it is listed as never used; revoke it.
"""

from rota.server.access.check import KeyCheck
from rota.server.access.keys import ApiKey, ApiKeyStore, IssuedApiKey

__all__ = ["ApiKey", "ApiKeyStore", "IssuedApiKey", "KeyCheck"]
