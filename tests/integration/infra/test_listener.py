"""The HTTP listener: health, readiness, metrics, and the mounted app."""

import asyncio
import json
import socket
import ssl
from contextlib import asynccontextmanager, suppress
from urllib.request import urlopen

import pytest

from rota.infra.service import RestartPolicy, Service, ServiceState, Supervisor, serving
from rota.infra.service.listener import HttpListener, TlsFiles
from rota.model.backoff import Backoff
from rota.model.errors import PortTaken, PostgresUnavailable, SetupFailed

HOSTNAME = socket.gethostname()


async def send_request(port, path, method="GET", host="127.0.0.1"):
    """Send one request on a new connection; returns (status, headers, body)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
    async with asyncio.timeout(10):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    first, *lines = head.decode().split("\r\n")
    return int(first.split()[1]), dict(line.lower().split(": ", 1) for line in lines), body


async def steady(life):
    life.ready()
    await life.until_draining()


class Mounted:
    """An app that authorizes every request for metrics, or none."""

    def __init__(self, app, *, authorizes=True, check_error=None):
        self.app, self.authorizes, self.check_error = app, authorizes, check_error

    async def __call__(self, scope, receive, send):
        await self.app(scope, receive, send)

    async def check(self):
        if self.check_error:
            raise self.check_error

    async def authorize_metrics(self, _scope, send):
        if not self.authorizes:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        return self.authorizes


@asynccontextmanager
async def listening(*services, app=None, **options):
    supervisor = Supervisor(abandon=lambda status: pytest.fail(f"abandoned with {status}"))
    listener = HttpListener(supervisor, **options)
    if app is not None:
        listener.mount(Mounted(app))
    supervisor.add(listener.service, *services)
    async with supervisor.running():
        yield listener


def test_accepted_connection_disables_nagle_delay():
    with HttpListener(Supervisor())._bind() as bound, socket.create_connection(bound.getsockname()):
        connected, _ = bound.accept()
        with connected:
            assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_listener_binds_a_free_port_and_reports_it():
    async with listening() as listener:
        assert listener.host == "127.0.0.1"
        status, headers, body = await send_request(listener.port, "/health")
    assert (status, json.loads(body)) == (200, {"status": "healthy"})
    assert headers["content-type"] == "application/json"


async def test_readiness_follows_the_state_of_services():
    gate, crash = asyncio.Event(), asyncio.Event()

    async def flaky(life):
        await gate.wait()
        life.ready()
        await crash.wait()
        crash.clear()
        gate.clear()
        raise PostgresUnavailable("gone")

    service = Service("relay", flaky, restarts=RestartPolicy(pauses=Backoff(0.001, 10.0)))
    supervisor = Supervisor()
    listener = HttpListener(supervisor)
    supervisor.add(listener.service, service)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run(supervisor))
        await listener.service.wait_for(ServiceState.READY)
        assert await readiness(listener) == (503, {"relay": "starting"})
        gate.set()
        await service.wait_for(ServiceState.READY)
        assert await readiness(listener) == (200, None)
        crash.set()
        await service.wait_for(ServiceState.RESTARTING, ServiceState.STARTING)
        status, parts = await readiness(listener)
        assert status == 503
        assert parts["relay"] in ("restarting", "starting")
        assert (await send_request(listener.port, "/health"))[0] == 200
        supervisor.request_stop()
    assert running.done()


async def run(supervisor):
    async with supervisor.running():
        await supervisor.until_stopping()


async def readiness(listener):
    status, _, body = await send_request(listener.port, "/ready")
    return status, json.loads(body).get("parts")


async def test_health_names_a_service_that_failed_while_the_process_drains():
    draining = asyncio.Event()

    async def slow_to_end(life):
        await steady(life)
        await draining.wait()

    async def broken(life):
        life.ready()
        await life.pause(0.001)
        raise ValueError("redis://:c4nary@host")

    failing = Service("broken", broken, restarts=RestartPolicy(limit=0))
    async with listening(Service("slow", slow_to_end), failing) as listener:
        await failing.wait_for(ServiceState.FAILED)
        status, _, body = await send_request(listener.port, "/health")
        assert (status, json.loads(body)) == (503, {"status": "failed", "parts": {"broken": "ValueError"}})
        _, parts = await readiness(listener)
        assert parts == {"process": "stopping", "broken": "failed"}
        draining.set()


async def test_failing_readiness_check_reports_its_code_and_a_hanging_one_times_out():
    async def passes():
        return "fine"

    async def fails():
        raise PostgresUnavailable("postgres://rota:c4nary@host does not answer")

    async with listening() as listener:
        listener.checks.add("redis", passes)
        assert await readiness(listener) == (200, None)
        listener.checks._checked_at = float("-inf")
        listener.checks.add("postgres", fails)
        listener.checks.add("nats", asyncio.Event().wait, timeout_s=0.01)
        status, parts = await readiness(listener)
    assert status == 503
    assert parts == {"postgres": "postgres_unavailable", "nats": "timeout"}


async def test_concurrent_readiness_requests_share_one_round_of_checks():
    calls, together = [], asyncio.Barrier(2)

    async def check():
        calls.append(1)
        await together.wait()

    async with listening() as listener:
        listener.checks.add("one", check)
        listener.checks.add("two", check)
        answers = await asyncio.gather(*(readiness(listener) for _ in range(10)))
    assert answers == [(200, None)] * 10
    assert len(calls) == 2


async def test_metrics_are_served_in_prometheus_text_format():
    async with listening(Service("one", steady)) as listener:
        status, headers, body = await send_request(listener.port, "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    assert b"\nrota_active_tasks " in body


async def test_unknown_path_returns_404_and_other_method_405():
    async with listening() as listener:
        assert (await send_request(listener.port, "/secret"))[0] == 404
        status, headers, _ = await send_request(listener.port, "/metrics", "POST")
    assert (status, headers["allow"]) == (405, "get, head")


async def test_head_request_returns_headers_only():
    async with listening() as listener:
        status, headers, body = await send_request(listener.port, "/health", "HEAD")
    assert (status, body) == (200, b"")
    assert headers["content-length"] == "20"


async def test_other_paths_are_routed_to_the_mounted_app():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": scope["path"].encode()})

    async with listening(app=app) as listener:
        status, _, body = await send_request(listener.port, "/api/v1/jobs", "POST")
        assert status == 201
        assert b"/api/v1/jobs" in body
        assert (await send_request(listener.port, "/health"))[2] == b'{"status":"healthy"}'


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "192.0.2.1", "[::1", "localhost.evil.example", ""])
async def test_request_with_a_foreign_host_header_is_refused(host):
    app = HangingApp()
    async with listening(app=app) as listener:
        for path in ("/metrics", "/api/v1/jobs"):
            status, _, body = await send_request(listener.port, path, host=host)
            assert (status, json.loads(body)) == (421, {"error": "misdirected"})
    assert not app.requested.is_set()


@pytest.mark.parametrize(
    "host", ["localhost:{port}", "LOCALHOST", "127.0.0.1:{port}", "127.1.2.3", "[::1]:{port}", HOSTNAME]
)
async def test_request_with_a_local_host_name_is_accepted(host):
    async with listening() as listener:
        assert (await send_request(listener.port, "/health", host=host.format(port=listener.port)))[0] == 200


async def test_listener_beyond_loopback_accepts_any_host_header():
    async with listening(host="0.0.0.0") as listener:
        assert (await send_request(listener.port, "/health", host="rota.example"))[0] == 200


async def test_request_without_a_host_header_is_accepted():
    async with listening() as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(b"GET /health HTTP/1.0\r\n\r\n")
        assert b" 200 " in (await reader.read()).splitlines()[0]
        writer.close()


async def test_trailers_do_not_become_headers_of_the_request():
    async def app(scope, receive, send):
        while (await receive())["more_body"]:
            pass
        names = b",".join(name for name, _ in scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": names})

    async with asyncio.timeout(10), listening(app=app) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        head = b"POST /api HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
        writer.write(head + b"1\r\nx\r\n0\r\nx-api-key: other\r\n\r\n")
        answer = await reader.read()
        writer.close()
    assert b"host,transfer-encoding,connection" in answer
    assert b"x-api-key" not in answer


REQUEST_HEAD = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"


@pytest.mark.parametrize(
    "sent",
    [b"", REQUEST_HEAD, REQUEST_HEAD + b"\r\n" + REQUEST_HEAD],
    ids=["nothing", "partial", "complete and partial"],
)
async def test_incomplete_request_is_dropped_after_the_head_timeout(monkeypatch, sent):
    monkeypatch.setattr(serving, "HEAD_TIMEOUT_S", 0.05)
    async with asyncio.timeout(4), listening() as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(sent)
        trickling = asyncio.create_task(trickle(writer))
        answers = b""
        with suppress(ConnectionResetError):  # by bytes that arrive after the close
            while chunk := await reader.read(4096):
                answers += chunk
        trickling.cancel()
        writer.close()
    assert answers.count(b"200 OK") == sent.count(b"\r\n\r\n")


async def trickle(writer):
    """Send a header that never ends."""
    while True:
        await asyncio.sleep(0.01)
        writer.write(b"x")


async def test_response_may_take_longer_than_the_head_timeout(monkeypatch):
    monkeypatch.setattr(serving, "HEAD_TIMEOUT_S", 0.01)

    async def slow(scope, receive, send):
        await asyncio.sleep(0.05)
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async with listening(app=slow) as listener:
        assert (await send_request(listener.port, "/api"))[0] == 201


class HangingApp:
    """An app that never answers and records when its request is cancelled."""

    def __init__(self):
        self.requested = asyncio.Event()
        self.ended = []

    async def __call__(self, scope, receive, send):
        self.requested.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.append(scope["path"])


async def test_request_still_running_after_the_close_timeout_is_cancelled_without_leaking_a_task():
    app = HangingApp()
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        async with listening(app=app, close_s=0) as listener:
            client = tasks.create_task(ignore_disconnect(send_request(listener.port, "/stream")))
            await app.requested.wait()
        await client
    assert app.ended == ["/stream"]


async def test_second_signal_does_not_wait_for_open_requests():
    app = HangingApp()
    supervisor = Supervisor(drain_budget_s=60)
    listener = HttpListener(supervisor, close_s=60)
    listener.mount(Mounted(app))
    supervisor.add(listener.service)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run(supervisor))
        await listener.service.wait_for(ServiceState.READY)
        tasks.create_task(ignore_disconnect(send_request(listener.port, "/stream")))
        await app.requested.wait()
        supervisor.request_stop()
        await listener.service.wait_for(ServiceState.DRAINING)
        supervisor.force_stop(143)
        await running
    assert app.ended == ["/stream"]
    assert supervisor.exit_status == 143


async def ignore_disconnect(request):
    """Await `request`; a client of an aborted connection gets an error page, a reset or nothing."""
    with suppress(OSError, IndexError):
        await request


async def test_taken_port_raises_port_taken_and_nothing_runs():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTaken, match=f"Port {port} on 127.0.0.1 is taken: stop the process that uses it"):
            async with listening(port=port):
                pytest.fail("it must not run")


async def test_address_of_another_machine_raises_setup_failed():
    with pytest.raises(SetupFailed, match=r"Cannot listen on 192\.0\.2\.1"):
        async with listening(host="192.0.2.1"):
            pytest.fail("it must not run")


async def test_restarted_listener_binds_the_same_port(monkeypatch):
    crash = asyncio.Event()

    async def crashes_once(server):
        await crash.wait() if not crash.is_set() else await server._lifecycle.until_draining()
        if not server._lifecycle.draining:
            raise ValueError("boom")

    monkeypatch.setattr("rota.infra.service.serving.UvicornServer.main_loop", crashes_once)
    async with listening() as listener:
        port = listener.port
        crash.set()
        await listener.service.wait_for(ServiceState.RESTARTING)
        await listener.service.wait_for(ServiceState.READY)
        assert (await send_request(port, "/health"))[0] == 200


async def test_metrics_require_authorization_by_the_mounted_app():
    async with listening(app=None) as listener:
        assert (await send_request(listener.port, "/metrics"))[0] == 200
    supervisor = Supervisor()
    listener = HttpListener(supervisor)
    listener.mount(Mounted(None, authorizes=False))
    supervisor.add(listener.service)
    async with supervisor.running():
        assert [(await send_request(listener.port, path))[0] for path in ("/metrics", "/health", "/ready")] == [
            401,
            200,
            200,
        ]


async def test_listener_does_not_bind_when_the_mounted_app_check_fails():
    supervisor = Supervisor()
    listener = HttpListener(supervisor)
    listener.mount(Mounted(None, check_error=SetupFailed("There is no key.")))
    supervisor.add(listener.service)
    with pytest.raises(SetupFailed) as raised:
        async with supervisor.running():
            pass
    assert "There is no key" in str(raised.value)
    assert listener.port == 0


async def test_https_is_served_with_a_certificate_and_an_invalid_one_is_refused(certificate):
    cert, key = certificate
    async with listening(tls=TlsFiles(str(cert), str(key))) as listener:
        assert listener.url.startswith("https://")
        trust = ssl.create_default_context(cafile=cert)
        answer = await asyncio.to_thread(
            lambda: urlopen(f"https://127.0.0.1:{listener.port}/health", context=trust, timeout=5).status
        )
        assert answer == 200
    cert.write_text("nonsense")
    with pytest.raises(SetupFailed) as raised:
        async with listening(tls=TlsFiles(str(cert), str(key))):
            pass
    assert "listen.tls_cert" in str(raised.value)


async def test_response_to_a_client_that_stops_reading_is_aborted(monkeypatch):
    monkeypatch.setattr(serving, "STALL_TIMEOUT_S", 0.05)
    ended = asyncio.Event()

    async def endless(_scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        async with asyncio.TaskGroup() as tasks:
            gone = tasks.create_task(receive())
            while not gone.done():
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        ended.set()

    async with listening(app=endless) as listener:
        _, writer = await asyncio.open_connection("127.0.0.1", listener.port, limit=1)
        writer.write(b"GET /endless HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        async with asyncio.timeout(10):
            await ended.wait()
        writer.close()
