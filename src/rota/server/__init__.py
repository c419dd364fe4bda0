"""What a replica serves to the outside besides health and metrics: the HTTP API, and gRPC.

`services` is handed to `runtime.serve` by the command that runs a replica, since the runtime lies below this room. The
API is `rota.server.http`; what gRPC serves to whom is said in `rota.infra.rpc.calls`, by the `.proto` files here.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rota.infra.service import Service
from rota.infra.service.listener import App
from rota.runtime import Replica

if TYPE_CHECKING:
    from rota.server.http.desk import Desk


def services(replica: Replica) -> list[Service]:
    """To be supervised with `replica`, whose listener serves the API from here on."""
    return [*grpc_services(replica), *http_services(replica)]


def http_services(replica: Replica) -> list[Service]:
    from rota.engine.watching import Watch, jobs_over
    from rota.server.access import KeyCheck
    from rota.server.http.desk import Desk
    from rota.server.http.door import Door
    from rota.server.http.pressure import Pressure
    from rota.server.http.streams import Streams
    from rota.workflow.looking import Looking

    check, api = KeyCheck(replica.database), replica.settings.api
    watch, runs_watch = Watch(jobs_over(replica.database)), Watch(Looking(replica.database).over)
    streams = Streams(check)
    replica.engine.finisher.listeners.append(watch.heard)
    pressure = Pressure(api.requests_per_s, api.requests_burst, api.requests_at_once)
    desk = Desk.of(replica, watch, runs_watch, streams, check)
    door = Door(partial(_built, desk), check, pressure, replica.listener, desk.keys)
    replica.listener.mount(door)
    # The last is the first to drain: whoever follows events goes on elsewhere at once.
    return [
        *check.services(),
        Service("watch", watch.run),
        Service("watch runs", runs_watch.run),
        Service("submitting", desk.together.run),
        Service("api", door.run),
        Service("streams", streams.run),
    ]


def _built(desk: Desk) -> App:
    from rota.server.http.app import build  # takes as long as everything else that a server does to start

    return build(desk)


def grpc_services(replica: Replica) -> list[Service]:
    """Without a shared secret nobody could be let in, so nothing is served."""
    if replica.settings.grpc.shared_secret is None:
        return []
    from rota.infra.rpc.calls import CallServer
    from rota.server.shows import ShowInterface

    return [CallServer(replica.settings.grpc, [ShowInterface(replica.books)]).service]
