"""The wheel and its extras, installed in virtual environments of their own: what they install, load and can do.

Packages come from uv's cache, which `make setup` has filled, and from the registry only if it lacks one.
"""

import json
import os
import subprocess

import pytest

from tools.distribution import CORE_BYTES_MAX, CORE_PACKAGES_MAX, build, install, problems_of

CALL_TIMEOUT_S = 60
SERVER_PACKAGES = {"asyncpg", "nats", "redis", "litestar", "grpc"}

IMPORT = """
import json, sys
from rota import Rota
print(json.dumps(sorted(sys.modules)))
"""
SUBMIT_AND_WAIT = """
import sys
from rota import LayerSpec, Rota, Submission
app = Rota()
job = app.sync.submit(Submission(show="default", topic="echo", layers=(LayerSpec(argv=("echo", "from a worker")),)))
print(job.wait(timeout=45), "".join(job.logs(follow=True)).strip())
print(sorted({name.partition(".")[0] for name in sys.modules} & set(sys.argv[1:])))
"""


@pytest.fixture(scope="module")
def distribution(tmp_path_factory):
    return build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def installed(distribution, tmp_path_factory):
    """Factory for environments: `installed("cli")`; "" is the wheel without an extra."""
    environments = {}

    def environment(extra):
        if extra not in environments:
            environments[extra] = install(distribution[0], extra, tmp_path_factory.mktemp(extra or "core"))
        return environments[extra]

    return environment


@pytest.fixture
def call(tmp_path):
    """Runs a program of an environment in an empty directory with a `rota up` of its own; returns its output."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    environ = {**kept, "ROTA_LOCAL_DATA_DIR": str(tmp_path / "data"), "ROTA_LISTEN_PORT": "0"}

    def run(environment, program, *arguments, status=0):
        ended = subprocess.run(
            [environment.program(program), *arguments],
            capture_output=True,
            check=False,
            cwd=tmp_path,
            env=environ,
            text=True,
            timeout=CALL_TIMEOUT_S,
        )
        assert ended.returncode == status, ended.stderr
        return ended.stdout if status == 0 else ended.stderr

    run.environ, run.directory = environ, tmp_path
    return run


def test_distributions_hold_the_sources_with_sql_and_lua_and_no_tests(distribution):
    assert problems_of(*distribution) == []


def test_rota_alone_installs_few_packages_and_loads_none_of_a_server(installed, call):
    core = installed("")
    assert len(core.packages) <= CORE_PACKAGES_MAX, core.packages
    assert core.bytes <= CORE_BYTES_MAX
    loaded = {name.partition(".")[0] for name in json.loads(call(core, "python", "-c", IMPORT))}
    assert not loaded & SERVER_PACKAGES
    refused = call(core, "rota", "--help", status=1)
    assert "run `pip install 'rota[cli]'`" in refused


def test_command_line_prints_its_help_and_names_the_extra_of_other_commands(installed, call):
    assert "Usage: rota" in call(installed("cli"), "rota", "--help")
    assert "postgres.url" in call(installed("cli"), "rota", "config", "show")
    for command, extra in (("worker", "worker"), ("server", "server"), ("up", "local")):
        assert f"run `pip install 'rota[{extra}]'`" in call(installed("cli"), "rota", command, status=1)


@pytest.mark.slow("installs four environments and starts a stack and a worker from them")
@pytest.mark.timeout(240)
def test_job_is_submitted_by_the_core_and_run_by_the_worker_extra(installed, call):
    core, worker, server, local = (installed(extra) for extra in ("", "worker", "server", "local"))
    call(local, "rota", "up", "--detach", "--no-worker")
    try:
        assert "applied" in call(server, "rota", "db", "status")
        assert call(server, "python", "-c", "import rota.server, rota.testing, rota.transactional") == ""
        running = subprocess.Popen(
            [worker.program("rota"), "worker"],
            cwd=call.directory,
            env=call.environ,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            submitted = call(core, "python", "-c", SUBMIT_AND_WAIT, *SERVER_PACKAGES)
            assert submitted.splitlines() == ["SUCCEEDED from a worker", "[]"]
            assert running.poll() is None
        finally:
            running.terminate()
            running.wait(timeout=30)
    finally:
        call(local, "rota", "down")
