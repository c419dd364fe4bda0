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
    from rota.server.http.dependencies import HttpDependencies


def services(replica: Replica) -> list[Service]:
    """To be supervised with `replica`, whose listener serves the API from here on."""
    return [*grpc_services(replica), *http_services(replica)]


def http_services(replica: Replica) -> list[Service]:
    from rota.engine.queries.wait_for_end import EndWaiter, ended_jobs_finder
    from rota.server.access import KeyCheck
    from rota.server.http.dependencies import HttpDependencies
    from rota.server.http.middleware.authentication import AuthenticationMiddleware
    from rota.server.http.middleware.rate_limit import RateLimiter
    from rota.server.http.open_streams import StreamRegistry
    from rota.workflow.run_queries import RunQueries

    check, api = KeyCheck(replica.database), replica.settings.api
    watch, runs_watch = (
        EndWaiter(ended_jobs_finder(replica.database)),
        EndWaiter(RunQueries(replica.database).ended_or_gone),
    )
    streams = StreamRegistry(check)
    replica.engine.finisher.listeners.append(watch.jobs_ended)
    pressure = RateLimiter(api.requests_per_s, api.requests_burst, api.requests_at_once)
    desk = HttpDependencies.from_replica(replica, watch, runs_watch, streams, check)
    door = AuthenticationMiddleware(partial(_build_app, desk), check, pressure, replica.listener, desk.keys)
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


def _build_app(desk: HttpDependencies) -> App:
    from rota.server.http.app import build  # takes as long as everything else that a server does to start

    return build(desk)


def grpc_services(replica: Replica) -> list[Service]:
    """Without a shared secret nobody could be let in, so nothing is served."""
    if replica.settings.grpc.shared_secret is None:
        return []
    from rota.infra.rpc.calls import RpcServer
    from rota.server.shows import ShowInterface

    return [RpcServer(replica.settings.grpc, [ShowInterface(replica.accounting)]).service]
