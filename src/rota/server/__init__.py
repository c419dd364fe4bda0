"""The network services of a replica besides health and metrics: the HTTP API and gRPC.

The command that runs a replica passes `services` to `runtime.serve`: `rota.runtime` must not import this package.

http     the HTTP API
access   API keys: storage and authentication
shows    the gRPC service `ShowInterface`, declared in `show.proto`

`rota.infra.rpc.calls` authenticates gRPC calls and routes them to the services of the `.proto` files.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rota.infra.service import Service
from rota.infra.service.listener import App
from rota.runtime import Replica

if TYPE_CHECKING:
    from rota.server.http.dependencies import HttpDependencies
    from rota.server.http.middleware.request_tokens import RequestTokens


def services(replica: Replica) -> list[Service]:
    """The services to supervise with `replica`. Mounts the API on its listener."""
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
    jobs_waiter, runs_waiter = (
        EndWaiter(ended_jobs_finder(replica.database)),
        EndWaiter(RunQueries(replica.database).ended_or_gone),
    )
    streams = StreamRegistry(check)
    replica.engine.completions.listeners.append(jobs_waiter.jobs_ended)
    tokens = _request_tokens(replica) if api.requests_per_s else None
    rate_limiter = RateLimiter(tokens, api.requests_at_once)
    deps = HttpDependencies.from_replica(replica, jobs_waiter, runs_waiter, streams, check)
    authentication = AuthenticationMiddleware(
        partial(_build_app, deps), check, rate_limiter, replica.listener, deps.keys
    )
    replica.listener.mount(authentication)
    # Services drain in reverse order: event streams close first, so their clients reconnect to another replica.
    return [
        *check.services(),
        Service("watch", jobs_waiter.run),
        Service("watch runs", runs_waiter.run),
        Service("submitting", deps.together.run),
        Service("api", authentication.run),
        Service("streams", streams.run),
    ]


def _request_tokens(replica: Replica) -> RequestTokens:
    from rota.server.http.middleware.request_tokens import RequestTokens

    api, members = replica.settings.api, replica.engine.members
    return RequestTokens(replica.redis, api.requests_per_s, api.requests_burst, lambda: len(members.live_replicas()))


def _build_app(deps: HttpDependencies) -> App:
    from rota.server.http.app import build  # importing it takes as long as the rest of the startup

    return build(deps)


def grpc_services(replica: Replica) -> list[Service]:
    """Empty without a shared secret: every call would be refused."""
    if replica.settings.grpc.shared_secret is None:
        return []
    from rota.infra.rpc.calls import RpcServer
    from rota.server.shows import ShowInterface

    return [RpcServer(replica.settings.grpc, [ShowInterface(replica.accounting)]).service]
