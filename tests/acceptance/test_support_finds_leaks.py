"""The test harness must detect resources that a test leaks."""

import os
import subprocess
import sys


def test_each_leak_fails_only_the_test_that_caused_it():
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
        "test_leaves_an_unpooled_session",
    }, done.stdout
    for text in ("tasks left behind", "b'stray'", "connections to Redis left open", "to PostgreSQL left behind"):
        assert text in done.stdout, text
    assert "9 passed, 5 errors" in done.stdout, done.stdout
