"""Access: keys of the API, and who stands behind one.

    keys = Keys(database)                                   # made, listed and revoked
    made = await keys.create("ci", [GrantSpec(Role.SUBMITTER, "film")], actor="cli:ann")

    checking = KeyCheck(database)                           # one per process; `checking.services()` are supervised
    actor = await checking.check(presented(authorization, api_key))
    guard(actor, Role.VIEWER, "film")

Who keeps what:
- a secret is shown once and stored nowhere: `Keys.create` returns it, tables and the audit trail never see it;
- every change is one transaction with its audit entry;
- who may do what is decided by `rota.model.access`, from what `KeyCheck` found;
- expiry goes by the clock of PostgreSQL alone;
- a key that was revoked is refused by every process within a second: it forgets what it remembers when it is told
  (NOTIFY), and after `check.REMEMBER_S` if it is not.

If the reply to `create` is lost, the key is there and its secret is gone: it is listed as never used, and revoked.
"""

from rota.server.access.check import KeyCheck
from rota.server.access.keys import ApiKey, ApiKeyStore, IssuedApiKey

__all__ = ["ApiKey", "ApiKeyStore", "IssuedApiKey", "KeyCheck"]
