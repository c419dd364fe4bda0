"""What a replica serves to the outside besides health and metrics: gRPC.

`services` is handed to `runtime.serve` by the command that runs a replica, since the runtime lies below this room. What
is served to whom is said in `rota.server.calls`; the contracts are the `.proto` files here.
"""

from __future__ import annotations

from rota.infra.service import Service
from rota.runtime import Replica


def services(replica: Replica) -> list[Service]:
    """To be supervised with `replica`. Without a shared secret nobody could be let in, so nothing is served."""
    if replica.settings.grpc.shared_secret is None:
        return []
    from rota.server.calls import CallServer
    from rota.server.shows import ShowInterface

    return [CallServer(replica.settings.grpc, [ShowInterface(replica.books)]).service]
