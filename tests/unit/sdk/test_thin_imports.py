"""What the SDK and the client load, and what they say where an extra is not installed."""

import subprocess
import sys

import pytest

from rota.infra.extras import needs_extra
from rota.model.errors import ExtraMissing

INFRA_OF_CLIENTS = {"clock", "data_dir", "extras", "settings_file", "telemetry", "yaml_reader"}
PACKAGES = {"api", "client", "infra", "model", "sdk"}
DEPENDENCIES = {"cronsim", "httptools", "msgspec", "typing_extensions"}

IMPORT_ALL = """
import pkgutil, sys
from importlib import import_module
import rota.client, rota.sdk
for package in (rota.client, rota.sdk):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        import_module(module.name)
import_module("rota.infra.settings_file")
"""
LIST_LOADED = "\nprint(*(name for name in sys.modules if not name.startswith('_')))"


def loaded_by(code):
    """Modules loaded by `code`; those that the virtual environment itself loads at start are left out."""
    run = [sys.executable, "-I", "-c"]
    before, after = (
        subprocess.run(
            [*run, f"import sys\n{text}{LIST_LOADED}"], capture_output=True, text=True, check=True, timeout=30
        )
        for text in ("", code)
    )
    return set(after.stdout.split()) - set(before.stdout.split())


def third_party(loaded):
    return {name.partition(".")[0] for name in loaded} - set(sys.stdlib_module_names) - {"rota", "cython_runtime"}


def test_sdk_and_client_load_no_module_of_the_engine_and_no_package_of_a_server():
    loaded = loaded_by(IMPORT_ALL)
    own = [name.split(".") for name in loaded if name.startswith("rota.")]
    assert {name[1] for name in own} == PACKAGES
    assert {name[2] for name in own if name[1] == "infra" and len(name) > 2} == INFRA_OF_CLIENTS
    assert third_party(loaded) <= DEPENDENCIES


def test_declaring_a_task_loads_no_http_client():
    loaded = loaded_by("import rota; rota.Rota().task(len)")
    assert third_party(loaded) <= DEPENDENCIES - {"httptools"}
    assert "rota.client.http" not in loaded


def test_missing_package_of_an_extra_is_one_sentence_that_says_what_to_install():
    with pytest.raises(ExtraMissing) as raised, needs_extra("server", "Submitting in your own transaction"):
        import package_that_nobody_has.part  # noqa: F401
    assert raised.value.sentence == (
        "Submitting in your own transaction needs package_that_nobody_has, which is not installed: "
        "run `pip install 'rota[server]'`."
    )


def test_missing_module_of_rota_is_a_defect_and_not_an_extra():
    with pytest.raises(ModuleNotFoundError), needs_extra("server", "This"):
        import rota.module_that_is_gone  # noqa: F401


def test_submitting_in_an_own_transaction_without_the_server_extra_says_what_to_install():
    code = """
import asyncio, sys
sys.modules["asyncpg"] = None  # as if it was not installed
import rota
from rota.model.errors import ExtraMissing
task = rota.Rota().task(name="noop")(lambda: None)
try:
    asyncio.run(task.on(object()).submit())
except ExtraMissing as error:
    print(error.sentence)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert "needs asyncpg, which is not installed: run `pip install 'rota[server]'`." in done.stdout


def test_rota_command_without_its_extra_says_what_to_install():
    code = """
import sys
sys.modules["typer"] = None  # as if it was not installed
from rota.cli.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "rota: The `rota` command needs typer, which is not installed: run `pip install 'rota[cli]'`. [extra_missing]\n"
    )


@pytest.mark.parametrize(
    ("command", "extra"), [("worker", "worker"), ("server", "server"), ("jobs", "server"), ("up", "local")]
)
def test_command_without_its_extra_says_what_to_install(command, extra):
    code = f"""
import sys
for package in ("asyncpg", "nats", "prometheus_client", "redis", "uvicorn"):
    sys.modules[package] = None
sys.argv = ["rota", {command!r}]
from rota.cli.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"which is not installed: run `pip install 'rota[{extra}]'`. [extra_missing]" in done.stderr
    assert done.stderr.count("\n") == 1
