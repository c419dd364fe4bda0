"""Fixtures and hooks every test has. Loaded by pytest itself (see pyproject), so nothing here is imported by tests."""

import asyncio
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
    config.addinivalue_line("markers", "soak: takes long; run by `make soak` only")
    config.addinivalue_line("markers", "slow(reason): may take longer than 15 s, and why it has to")
    config.addinivalue_line("markers", "keeps_scripts: on a Redis on which no other test flushes scripts")
    config.addinivalue_line("markers", "new_database: made for this test, with no old rows in its files")
    config.addinivalue_line("markers", "no_days: without the partitions that the first server makes")
    config.addinivalue_line("markers", "new_connections: PostgreSQL sessions are opened and closed, not kept")
    # A background job, nohup or cron ignores SIGINT, and every child would inherit that: tests press Ctrl-C.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    logs.configure("console", "warning")  # unconfigured, structlog prints to stdout, with the locals of every frame
    if not hasattr(config, "workerinput"):
        config.stash[SERVERS] = SharedServers()
        config.pluginmanager.register(Durations())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    # The longest first, so that no process ends its run long after the others.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if not config.option.markexpr:
        chosen = [item for item in items if "soak" not in item.keywords]
        config.hook.pytest_deselected(items=[item for item in items if "soak" in item.keywords])
        items[:] = chosen


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    """In CI nothing is skipped: what is missing there has to be installed."""
    outcome = yield
    report = outcome.get_result()
    if report.skipped and os.environ.get("CI") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, and CI skips nothing: {report.longrepr[2]}"


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector):
    """A module that skips itself is skipped, too."""
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
    """URLs of the run's shared PostgreSQL, Valkey and NATS."""
    given = getattr(request.config, "workerinput", None)
    return Stack(**given["stack"]) if given else request.config.stash[SERVERS].stack()


@pytest.fixture(scope="session")
def _admin(stack):
    with psycopg.connect(stack.postgres_url, autocommit=True) as connection:
        yield connection


@pytest.fixture(scope="session")
def _redis_admins(stack):
    """Clients of both servers, by whether it is the calm one."""
    admins = {}
    for calm in (False, True):
        admins[calm] = Redis.from_url(stack.redis_db_url(0, calm=calm), single_connection_client=True)
        admins[calm].set_response_callback("CLIENT LIST", bytes.decode)
    yield admins
    for client in admins.values():
        client.close()


@pytest.fixture(autouse=True)
def _no_leaked_tasks(request):
    """A test that leaves a task behind fails. Set up first, so it looks after every other fixture is done."""
    if request.node.get_closest_marker("asyncio") or "_connections" in request.fixturenames:
        request.getfixturevalue("_tasks_end_with_the_test")


@pytest.fixture
async def _tasks_end_with_the_test():
    yield
    for _ in range(10):  # what was cancelled or closed just now still needs a turn of the loop
        await asyncio.sleep(0)
    leaked = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    told = f"tasks left behind: {leaked}"
    for task in leaked:
        task.cancel()  # the loop is that of the next test, too
    if leaked:
        await asyncio.wait(leaked, timeout=5)
    assert not leaked, told


@pytest.fixture(scope="session")
async def _connections():
    """Connections that are kept from test to test; all tests of a process run in this event loop."""
    lend_in(asyncio.get_running_loop())
    kept = Connections()
    yield kept
    kept.close()
    await asyncio.sleep(0)  # transports close in the next turn
    if commands := sys.modules.get("tests.support.commands"):
        await asyncio.to_thread(commands.close)


@pytest.fixture(scope="session")
def _pools(_admin, stack, _connections):
    """Databases by their template and by whether connections to them are kept."""
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
    """URL of a database with Rota's schema and nothing else in it."""
    marks = {mark.name for mark in request.node.iter_markers()}
    kept = "new_connections" not in marks
    databases = _pools[TEMPLATE_WITHOUT_DAYS if "no_days" in marks else TEMPLATE, kept]
    name = databases.lend(new="new_database" in marks)
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
    """URL of a fresh database with nothing in it."""
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
    """URL of an empty logical database of the shared Valkey; what is left in it must be ours or about to expire."""
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


@pytest.fixture
async def bus_prefix(nats_url):
    """A word of this test's own for stream names; streams that carry it are removed afterwards."""
    import nats

    prefix = f"T{os.environ.get('PYTEST_XDIST_WORKER', 'main').upper()}X{next(NUMBERS)}"
    yield prefix
    client = await nats.connect(nats_url)
    manager = client.jsm()
    for stream in await manager.streams_info():
        if stream.config.name.startswith(f"{prefix}_") or stream.config.name == prefix:
            await manager.delete_stream(stream.config.name)
    await client.close()


@pytest.fixture(scope="session")
def made_data(tmp_path_factory):
    """A data directory in which a stack has been started and stopped: copying it saves an initdb."""
    directory = tmp_path_factory.mktemp("made") / "data"

    # In a process of its own, since this one may be in the middle of a test's event loop.
    owner = [sys.executable, "-m", "tests.integration.local.stack_owner", str(directory)]
    subprocess.run(owner, input=b"\n", check=True, capture_output=True, timeout=60)
    (directory / "state.json").unlink()  # each copy chooses ports of its own
    return directory


@pytest.fixture
async def private_stack(request):
    """Factory for servers of this test's own, to be killed or filled: `await private_stack("redis", …)`."""
    started = []

    async def start(*servers, **options):
        directory = Path(tempfile.mkdtemp(prefix="rota-test-"))
        if "postgres" in servers:
            shutil.copytree(request.getfixturevalue("made_data"), directory, dirs_exist_ok=True)
        stack = LocalStack(options_for_tests(directory, servers=servers, **options))
        started.append((stack, directory))
        await stack.start()
        return stack

    yield start
    for stack, directory in started:
        await stack.stop()
        shutil.rmtree(directory, ignore_errors=True)


class PrivateRedis:
    """A Valkey of one test's own."""

    def __init__(self, server):
        self._server = server

    @property
    def url(self):
        return self._server.url

    @property
    def pid(self):
        return self._server.process.pid

    async def kill(self):
        """kill -9, and wait until it is gone."""
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
    """Factory for a second process of ours: `await spawn("module", *args, env={...})`."""
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
    """Factory for a bad network: `await proxy(host, port)`."""
    started = []

    async def start(host, port):
        opened = await Proxy(host, port).start()
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
