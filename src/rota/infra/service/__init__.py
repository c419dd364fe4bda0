"""How work runs in a process: services, who supervises them, one signal path, one listener.

`Listener` is imported from `rota.infra.service.listener` by whoever serves, since it brings an HTTP server
along.
"""

from rota.infra.service.lifecycle import Lifecycle, RestartPolicy, Service, ServiceState
from rota.infra.service.supervisor import Supervisor, run_until_signalled

__all__ = ["Lifecycle", "RestartPolicy", "Service", "ServiceState", "Supervisor", "run_until_signalled"]
