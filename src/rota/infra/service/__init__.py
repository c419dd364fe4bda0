"""Services of a process: lifecycle, supervision, signals, periodic tasks, and the HTTP listener.

    lifecycle    `Service`: start, ready, drain, stop; restarts after crashes
    supervisor   starts services in order, stops them in reverse; signals and exit status
    periodic     repeated passes beside a main loop
    listener     /health, /ready, /metrics and the mounted API
    serving      uvicorn with timeouts for slow clients

Invariants: a service runs in one task of the supervisor's TaskGroup; an unexpected end is a crash; every stop is
bounded. Import `HttpListener` from `rota.infra.service.listener`, because it imports an HTTP server. Callers: runtime,
worker, policy kernel, CLI.
"""

from rota.infra.service.lifecycle import Lifecycle, RestartPolicy, Service, ServiceState
from rota.infra.service.supervisor import Supervisor, run_until_signalled

__all__ = ["Lifecycle", "RestartPolicy", "Service", "ServiceState", "Supervisor", "run_until_signalled"]
