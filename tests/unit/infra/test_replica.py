"""Names of processes."""

import os
import subprocess
import sys

from rota.infra import replica

SCRIPT = "import os; os.getpid = lambda: 1; from rota.infra.replica import replica_name; print(replica_name())"


def test_name_of_a_process_stays_and_begins_with_host_and_pid():
    assert replica.replica_name() == replica.replica_name()
    assert replica.replica_name().startswith(f"{replica.process_name()}:")
    assert replica.process_name().endswith(f":{os.getpid()}")


def test_containers_with_one_host_name_and_pid_have_different_names():
    names = [subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, check=True).stdout for _ in range(3)]
    assert len(set(names)) == 3
