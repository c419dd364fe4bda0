"""Options to reproduce flaky tests: `make tests ARGS="-k lease --repeat 200 --burn 2"`.

`--repeat N` runs each test N times; `--burn N` keeps N cores busy meanwhile, like a shared machine.
"""

import subprocess
import sys

import pytest

BURN = """
import os
parent = os.getppid()
while os.getppid() == parent:  # it ends with a run that was killed
    for _ in range(1_000_000):
        pass
"""


def pytest_addoption(parser):
    group = parser.getgroup("reproducing flaky tests")
    group.addoption("--repeat", type=int, default=1, metavar="N", help="run each test N times")
    group.addoption("--burn", type=int, default=0, metavar="N", help="keep N cores busy during the run")


def pytest_configure(config):
    if config.option.burn and not hasattr(config, "workerinput"):
        command = [sys.executable, "-c", BURN]
        burners = [subprocess.Popen(command) for _ in range(config.option.burn)]
        config.add_cleanup(lambda: [burner.kill() or burner.wait() for burner in burners])


@pytest.fixture
def _repeated(request):
    return request.param


def pytest_generate_tests(metafunc):
    if (times := metafunc.config.option.repeat) > 1:
        metafunc.fixturenames.append("_repeated")
        metafunc.parametrize("_repeated", range(times), indirect=True)
