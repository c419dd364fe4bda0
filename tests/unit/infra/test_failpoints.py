"""Failpoints: named places in the code where a process crashes, pauses or loses a reply."""

import collections
import json
import os
import re
import signal
import subprocess
import sys

import pytest

from rota.infra import failpoints
from rota.infra.failpoints import FaultPlan, LostReply
from rota.model.errors import InvalidSetting

VISITS = """
from rota.infra import failpoints
for visit in range(1, 4):
    print(visit, flush=True)
    failpoints.hit("lease.after_acquire")
print("end", flush=True)
"""


def visits(**environment):
    return subprocess.Popen(
        [sys.executable, "-c", VISITS],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_failpoint_without_variables_is_a_no_op():
    assert failpoints.hit is failpoints.after_send
    assert failpoints.hit("room.point") is None
    assert not FaultPlan.parse({})


def test_crash_failpoint_ends_the_process_at_the_given_hit_and_logs_it():
    process = visits(CRASH_AT="other.place,lease.after_acquire:2")
    output, errors = process.communicate(timeout=20)
    assert process.returncode == failpoints.CRASH_EXIT_STATUS
    assert output.split() == ["1", "2"]
    armed, crashed = map(json.loads, errors.splitlines())
    assert (armed["event"], armed["crash_at"]) == ("failpoints_armed", {"other.place": 1, "lease.after_acquire": 2})
    assert (crashed["event"], crashed["place"]) == ("failpoint_crash", "lease.after_acquire")


def test_paused_process_continues_after_sigcont():
    process = visits(PAUSE_AT="lease.after_acquire")
    try:
        assert process.stdout.readline() == "1\n"
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), "it ended instead of stopping"
        process.send_signal(signal.SIGCONT)
        output, _ = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert output.split() == ["2", "3", "end"]
    assert process.returncode == 0


def test_lost_reply_raises_connection_error_at_its_hit_only_and_is_logged(capsys):
    plan = FaultPlan.parse({"LOST_REPLY_AT": "lease.renew:2"})
    plan.after_send("lease.renew")
    with pytest.raises(LostReply) as lost:
        plan.after_send("lease.renew")
    assert isinstance(lost.value, ConnectionError)
    plan.after_send("lease.renew")
    record = json.loads(capsys.readouterr().err)
    assert (record["event"], record["place"]) == ("failpoint_lost_reply", "lease.renew")


def test_hits_of_one_failpoint_do_not_count_for_another():
    plan = FaultPlan.parse({"LOST_REPLY_AT": "lease.renew:2"})
    plan.after_send("lease.acquire")
    plan.hit("lease.renew")
    plan.after_send("lease.renew")
    with pytest.raises(LostReply):
        plan.after_send("lease.renew")


@pytest.mark.parametrize("text", ["lease", "lease.renew:0", "lease.renew:x", "Lease.Renew", "a.b.c", "a.b:1:2"])
def test_malformed_failpoint_is_refused_with_its_text(text):
    with pytest.raises(InvalidSetting, match=re.escape(f"CRASH_AT='{text}'")):
        FaultPlan.parse({"CRASH_AT": text})


def test_failpoint_names_in_the_source_are_literal_dotted_and_unique():
    found = failpoints.declared_failpoints()
    twice = [place for place, times in collections.Counter(found).items() if times > 1]
    malformed = [name for _, name in found if not re.fullmatch(r"[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*", name)]
    assert not twice
    assert not malformed
