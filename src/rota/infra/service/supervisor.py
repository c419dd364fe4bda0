"""The services of one process, and their only signal path.

    supervisor = Supervisor()
    supervisor.add(listener.service, relay, reconciler)
    sys.exit(asyncio.run(run_until_signalled(supervisor)))

Services start in the order of `add`, each when its predecessor is ready, and stop in reverse, each when its successor
has ended: a dependency outlives its users. The first SIGTERM or SIGINT drains, the second cancels. A service that fails
for good drains the rest and makes the exit status 1: other replicas can take over all work, so a fresh process is the
best repair.

The drain budget is shared: when it is spent, running services are cancelled. The process exits without a body that
ignores cancellation (`abandon`); leases and fences in PostgreSQL make that as safe as kill -9.

Exit status: 0 drained cleanly · 1 a service failed, crashed or was cancelled · 128+n cancelled by a second signal n.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import structlog

from rota.infra.service.lifecycle import Service, ServiceState
from rota.infra.telemetry.redaction import redact_text
from rota.model.errors import RotaError, SetupFailed

log = structlog.get_logger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Supervisor:
    def __init__(
        self,
        *,
        start_timeout_s: float = 60.0,
        drain_budget_s: float = 20.0,
        abandon: Callable[[int], object] = os._exit,
    ) -> None:
        self.services: list[Service] = []
        self._start_timeout_s = start_timeout_s
        self._drain_budget_s = drain_budget_s
        self._abandon = abandon
        self._stopping = asyncio.Event()
        self._forced_status: int | None = None

    def add(self, *services: Service) -> None:
        for service in services:
            assert service.name not in [known.name for known in self.services], f"two services {service.name!r}"
            service.subscribe(self._on_change)
            self.services.append(service)

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    async def until_stopping(self) -> None:
        """Wait until the process is stopping. Long responses (event streams) end when this returns."""
        await self._stopping.wait()

    def failed(self) -> dict[str, str]:
        """Services that failed for good, with the kind of their error. Kinds contain no secrets; messages might."""
        return {
            service.name: error_kind(service.error) for service in self.services if service.state is ServiceState.FAILED
        }

    def unready(self) -> dict[str, str]:
        waiting = {s.name: s.state.value for s in self.services if s.state is not ServiceState.READY}
        return {"process": "stopping", **waiting} if self.stopping else waiting

    @property
    def exit_status(self) -> int:
        if self._forced_status is not None:
            return self._forced_status
        return int(any(service.cut or service.state is ServiceState.FAILED for service in self.services))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """All services, from the first start to the last end. Raises if one does not become ready."""
        failure: Exception | None = None
        async with asyncio.TaskGroup() as tasks:
            try:
                await self._start(tasks)
                yield
            except Exception as error:  # noqa: BLE001 - raised below, outside the TaskGroup
                failure = error
            finally:
                await self._stop()
        if failure is not None:
            raise failure

    def request_stop(self) -> None:
        """Start draining. Services that are not ready have no work and end immediately."""
        self._stopping.set()
        for service in self.services:
            if service.state in (ServiceState.STARTING, ServiceState.RESTARTING):
                service.drain()

    def force_stop(self, status: int) -> None:
        """Cancel all running services; the process exits with `status`."""
        self.request_stop()
        for service in self.services:
            if not service.state.ended:
                self._forced_status = status
                service.cancel()

    async def _start(self, tasks: asyncio.TaskGroup) -> None:
        for service in self.services:
            if self.stopping:
                return
            service.start(tasks)
            await self._until_ready(service)

    async def _until_ready(self, service: Service) -> None:
        try:
            async with asyncio.timeout(self._start_timeout_s):
                state = await service.wait_for(ServiceState.READY, ServiceState.DRAINING)
        except TimeoutError:
            cause = service.error
            raise SetupFailed(
                f"Service {service.name} was not ready within {self._start_timeout_s:g} s"
                f"{f' ({redact_text(str(cause))})' if cause else ''}: see its log and try again."
            ) from cause
        if state is ServiceState.FAILED:
            if isinstance(service.error, RotaError):
                raise service.error
            raise SetupFailed(
                f"Service {service.name} could not start ({error_kind(service.error)}): see its log."
            ) from service.error

    async def _stop(self) -> None:
        self.request_stop()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._drain_budget_s
        ended = {s.name: await s.stop(max(0.0, deadline - loop.time())) for s in reversed(self.services)}
        if stuck := [name for name, has_ended in ended.items() if not has_ended]:
            log.critical("services_ignore_cancellation", services=stuck)
            self._abandon(self.exit_status)

    def _on_change(self, service: Service) -> None:
        log.debug("service_state", service=service.name, state=service.state.value)
        if service.state is ServiceState.FAILED:
            self.request_stop()


async def run_until_signalled(supervisor: Supervisor) -> int:
    """Run the services until a signal or a failure ends them. Returns the exit status; needs the main thread."""
    received: list[signal.Signals] = []

    def on_signal(number: signal.Signals) -> None:
        received.append(number)
        log.info("signal_received", signal=number.name, count=len(received))
        if len(received) == 1:
            supervisor.request_stop()
        else:
            supervisor.force_stop(128 + number)

    with _signal_handlers(on_signal):
        async with supervisor.running():
            if not supervisor.stopping:
                log.info("services_ready", services=len(supervisor.services))
            await supervisor.until_stopping()
    return supervisor.exit_status


@contextmanager
def _signal_handlers(on_signal: Callable[[signal.Signals], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


def error_kind(error: BaseException | None) -> str:
    """The stable code of a Rota error, the type name of any other."""
    return error.code if isinstance(error, RotaError) else type(error).__name__
