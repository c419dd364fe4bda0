"""Fixtures and hooks of all tests. Loaded by pytest as a plugin (see pyproject)."""

import asyncio
import fcntl
import gc
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psycopg
import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from rota.infra.telemetry import logs
from rota.local import LocalStack
from tests.support.harness.connections import Connections, lend_in
from tests.support.harness.databases import DatabasePool, fresh_database
from tests.support.harness.durations import Durations
from tests.support.harness.made_data import copy_made
from tests.support.harness.nats_admin import NatsAdmin
from tests.support.harness.second_process import SecondProcess
from tests.support.harness.servers import (
    REDIS_DATABASES,
    TEMPLATE,
    TEMPLATE_WITHOUT_DAYS,
    SharedServers,
    Stack,
    options_for_tests,
)
from tests.support.proxy import Proxy
from tests.support.waiting import until, until_closed

SERVERS = pytest.StashKey[SharedServers]()
NUMBERS = itertools.count()


def pytest_configure(config):
    config.addinivalue_line("markers", "soak: takes long; run only by `make soak`")
    config.addinivalue_line("markers", "slow(reason): may take longer than 15 s, for this reason")
    config.addinivalue_line("markers", "keeps_scripts: uses a Redis server whose scripts no other test flushes")
    config.addinivalue_line("markers", "new_database: uses a newly created database without dead rows")
    config.addinivalue_line("markers", "no_days: without the day partitions that the first server creates")
    config.addinivalue_line("markers", "new_connections: PostgreSQL connections are not pooled")
    # Under nohup or cron SIGINT is ignored and children would inherit that, but tests send SIGINT.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    logs.configure("console", "warning")  # unconfigured structlog prints to stdout, with local variables
    if not hasattr(config, "workerinput"):
        config.stash[SERVERS] = SharedServers()
        config.pluginmanager.register(Durations())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    # Slow tests first, so that all processes finish at about the same time.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if not config.option.markexpr:
        chosen = [item for item in items if "soak" not in item.keywords]
        config.hook.pytest_deselected(items=[item for item in items if "soak" in item.keywords])
        items[:] = chosen


def pytest_collection_finish():
    """What was imported and collected, half a million objects, stays to the end: no collection looks at it again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    """A skipped test fails in CI: missing programs must be installed there."""
    outcome = yield
    report = outcome.get_result()
    if report.skipped and os.environ.get("CI") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, and CI skips nothing: {report.longrepr[2]}"


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector):
    """The same for skipped modules."""
    outcome = yield
    report = outcome.get_result()
    if report.skipped and os.environ.get("CI"):
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid} was skipped, and CI skips nothing: {report.longrepr[2]}"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["stack"] = node.config.stash[SERVERS].stack().as_dict()


def pytest_unconfigure(config):
    if servers := config.stash.get(SERVERS, None):
        servers.stop()


@pytest.fixture(scope="session")
def stack(request):
    """URLs of the shared PostgreSQL, Valkey and NATS."""
    given = getattr(request.config, "workerinput", None)
    return Stack(**given["stack"]) if given else request.config.stash[SERVERS].stack()


@pytest.fixture(scope="session")
def _admin(stack):
    with psycopg.connect(stack.postgres_url, autocommit=True) as connection:
        yield connection


@pytest.fixture(scope="session")
def _redis_admins(stack):
    """Clients of both Redis servers, by `calm`."""
    admins = {}
    for calm in (False, True):
        admins[calm] = Redis.from_url(stack.redis_db_url(0, calm=calm), single_connection_client=True)
        admins[calm].set_response_callback("CLIENT LIST", bytes.decode)
    yield admins
    for client in admins.values():
        client.close()


@pytest.fixture(autouse=True)
def _no_leaked_tasks(request):
    """Fails a test that leaks a task. Set up first, so that it checks after all other fixtures."""
    if request.node.get_closest_marker("asyncio") or "_connections" in request.fixturenames:
        request.getfixturevalue("_tasks_end_with_the_test")


ENDING_TASKS_S = 1.0


def _other_tasks():
    return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


@pytest.fixture
async def _tasks_end_with_the_test():
    yield
    for _ in range(10):  # recently cancelled or closed tasks need a few loop iterations
        await asyncio.sleep(0)
    leaked = _other_tasks()
    if leaked:  # gRPC's own tasks end when its thread has polled: a task that stays is a leak
        await asyncio.wait(leaked, timeout=ENDING_TASKS_S)
        leaked = _other_tasks()
    message = f"tasks left behind: {leaked}"
    for task in leaked:
        task.cancel()  # the next test uses the same loop
    if leaked:
        await asyncio.wait(leaked, timeout=5)
    assert not leaked, message


@pytest.fixture(scope="session")
async def _connections():
    """Pooled connections; all tests of a process run in this event loop."""
    lend_in(asyncio.get_running_loop())
    kept = Connections()
    yield kept
    kept.close()
    await asyncio.sleep(0)  # transports close in the next loop iteration
    if commands := sys.modules.get("tests.support.commands"):
        await asyncio.to_thread(commands.close)


@pytest.fixture(scope="session")
def _pools(_admin, stack, _connections):
    """Database pools by template and by whether connections are pooled."""
    pools = {
        (template, kept): DatabasePool(_admin, stack, _connections, template)
        for template in (TEMPLATE, TEMPLATE_WITHOUT_DAYS)
        for kept in (True, False)
    }
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def database_url(request, _pools, _connections, stack):
    """URL of a database with Rota's schema and no data."""
    markers = {marker.name for marker in request.node.iter_markers()}
    kept = "new_connections" not in markers
    databases = _pools[TEMPLATE_WITHOUT_DAYS if "no_days" in markers else TEMPLATE, kept]
    name = databases.lend(new="new_database" in markers)
    url = stack.database_url(name)
    if kept:
        _connections.keep(url)
    yield url
    if leaked := _connections.leaked():
        databases.drop(name)
        pytest.fail(f"connections to PostgreSQL left behind: {leaked}")
    databases.take_back(name)


@pytest.fixture
def empty_database_url(_admin, stack):
    """URL of a new, empty database."""
    with fresh_database(_admin, stack, "template0") as url:
        yield url


@pytest.fixture
async def database(database_url):
    from rota.infra.postgres import Database, PostgresTarget

    opened = await Database.open(PostgresTarget(url=database_url))
    yield opened
    await opened.close()


@pytest.fixture
def redis_url(request, stack, _redis_admins):
    """URL of an empty logical database of the shared Valkey; leftover keys must be declared or have a TTL."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    share = REDIS_DATABASES // max(16, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    number = worker * share + 1 + next(NUMBERS) % (share - 1)
    calm = request.node.get_closest_marker("keeps_scripts") is not None
    admin = _redis_admins[calm]
    yield stack.redis_db_url(number, calm=calm)
    try:
        until_closed(lambda: f" db={number} " not in admin.execute_command("CLIENT LIST"), "Redis")
    finally:
        admin.select(number)
        stray = _stray_keys(admin)
        admin.flushdb()
        admin.select(0)
    assert not stray, f"keys without an owner or a time to live: {stray}"


def _stray_keys(client):
    from rota.infra.redis import RedisKeys

    return [key for key in client.scan_iter(count=1000) if not RedisKeys.is_declared(key) and client.ttl(key) == -1]


@pytest.fixture
async def redis(redis_url):
    client = redis_async(redis_url)
    yield client
    await client.aclose()


def redis_async(url):
    return AsyncRedis.from_url(url, socket_timeout=5, socket_connect_timeout=5)


@pytest.fixture
def nats_url(stack):
    return stack.nats_url


@pytest.fixture(scope="session")
def _nats_admin(stack):
    admin = NatsAdmin(stack.nats_url)
    yield admin
    admin.close()


@pytest.fixture
def bus_prefix(_nats_admin):
    """A unique prefix for stream names; streams with it are deleted afterwards."""
    prefix = f"T{os.environ.get('PYTEST_XDIST_WORKER', 'main').upper()}X{next(NUMBERS)}"
    yield prefix
    _nats_admin.delete_streams(prefix)


@pytest.fixture(scope="session")
def made_data(tmp_path_factory):
    """A data directory with a migrated schema, see `harness.made_data`; made by the first process that needs it."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    directory = shared / "made" / "data"
    directory.parent.mkdir(exist_ok=True)
    with (directory.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory.parent / "done").exists():
            # In a separate process, because this one may be running an event loop.
            maker = [sys.executable, "-m", "tests.support.harness.made_data", str(directory)]
            subprocess.run(maker, check=True, capture_output=True, timeout=60)
            (directory.parent / "done").touch()
    return directory


@pytest.fixture
async def private_stack(request):
    """Factory for private servers that a test may kill or fill: `await private_stack("redis", …)`."""
    started = []

    async def start(*servers, **options):
        directory = Path(tempfile.mkdtemp(prefix="rota-test-"))
        if "postgres" in servers:
            copy_made(request.getfixturevalue("made_data"), directory)
        stack = LocalStack(options_for_tests(directory, servers=servers, **options))
        started.append((stack, directory))
        await stack.start()
        return stack

    yield start
    for stack, directory in started:
        await stack.stop()
        shutil.rmtree(directory, ignore_errors=True)


class PrivateRedis:
    """A private Valkey server."""

    def __init__(self, server):
        self._server = server

    @property
    def url(self):
        return self._server.url

    @property
    def pid(self):
        return self._server.process.pid

    async def kill(self):
        """Send SIGKILL and wait for the exit."""
        os.kill(self.pid, 9)
        await self._server.process.wait()

    async def restart(self):
        """Start it again, empty, at the same URL."""
        await self._server.restart()


@pytest.fixture
async def private_redis(private_stack):
    async def start(*, cluster=False):
        stack = await private_stack("redis", redis_cluster=cluster)
        private = PrivateRedis(stack.servers["redis"])
        if cluster:
            async with redis_async(private.url) as client:
                await client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
                await until(lambda: _cluster_is_up(client), what="the cluster's start")
        return private

    return start


async def _cluster_is_up(client):
    return b"cluster_state:ok" in await client.execute_command("CLUSTER", "INFO")


@pytest.fixture
async def spawn():
    """Factory for separate processes: `await spawn("module", *args, env={...})`."""
    started = []

    async def start(module, *args, **more):
        process = await SecondProcess.start(module, *args, **more)
        started.append(process)
        return process

    yield start
    for process in started:
        await process.end()


@pytest.fixture
async def proxy():
    """Factory for proxies that simulate network faults: `await proxy(host, port)`, `kind` for another class."""
    started = []

    async def start(host, port, kind=Proxy):
        opened = await kind(host, port).start()
        started.append(opened)
        return opened

    yield start
    for opened in started:
        await opened.close()


@pytest.fixture
def certificate(tmp_path):
    """A key and a certificate for 127.0.0.1."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl not found: install it, such as by `apt-get install openssl`")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=rota"
    files = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(["openssl", *made.split(), *files], check=True, capture_output=True)
    return cert, key
