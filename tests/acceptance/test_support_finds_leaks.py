"""The ground is only worth standing on if it notices what a test leaves behind."""

import os
import subprocess
import sys


def test_every_kind_of_leak_fails_its_test_and_nothing_else():
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-n0",
            "-p",
            "no:randomly",
            "-p",
            "no:cacheprovider",
            "-rEF",
            "tests/support/harness/leaky.py",
        ],
        capture_output=True,
        text=True,
        timeout=55,
        env={**os.environ, "TEST_CLOSED_WITHIN_S": "0.3"},
        check=False,
    )
    found = {line.split("::")[1].split(" ")[0]: line for line in done.stdout.splitlines() if line.startswith("ERROR ")}
    assert set(found) == {
        "test_leaves_a_task",
        "test_leaves_a_key",
        "test_leaves_a_redis_connection",
        "test_leaves_a_postgres_connection",
        "test_leaves_a_session_that_nobody_keeps",
    }, done.stdout
    for words in ("tasks left behind", "b'stray'", "connections to Redis left open", "to PostgreSQL left behind"):
        assert words in done.stdout, words
    assert "9 passed, 5 errors" in done.stdout, done.stdout
