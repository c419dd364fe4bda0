"""Named places where a process dies, stops or loses a reply."""

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


def test_without_variables_a_place_is_an_empty_function():
    assert failpoints.hit is failpoints.after_send
    assert failpoints.hit("room.point") is None
    assert not FaultPlan.parse({})


def test_an_armed_process_dies_at_the_asked_visit_and_says_so():
    process = visits(CRASH_AT="other.place,lease.after_acquire:2")
    output, errors = process.communicate(timeout=20)
    assert process.returncode == failpoints.CRASH_EXIT_STATUS
    assert output.split() == ["1", "2"]
    armed, crashed = map(json.loads, errors.splitlines())
    assert (armed["event"], armed["crash_at"]) == ("failpoints_armed", {"other.place": 1, "lease.after_acquire": 2})
    assert (crashed["event"], crashed["place"]) == ("failpoint_crash", "lease.after_acquire")


def test_a_paused_process_goes_on_after_it_is_continued():
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


def test_a_lost_reply_is_a_connection_error_at_its_visit_only_and_is_told(capsys):
    plan = FaultPlan.parse({"LOST_REPLY_AT": "lease.renew:2"})
    plan.after_send("lease.renew")
    with pytest.raises(LostReply) as lost:
        plan.after_send("lease.renew")
    assert isinstance(lost.value, ConnectionError)
    plan.after_send("lease.renew")
    told = json.loads(capsys.readouterr().err)
    assert (told["event"], told["place"]) == ("failpoint_lost_reply", "lease.renew")


def test_visits_of_one_place_do_not_count_for_another():
    plan = FaultPlan.parse({"LOST_REPLY_AT": "lease.renew:2"})
    plan.after_send("lease.acquire")
    plan.hit("lease.renew")
    plan.after_send("lease.renew")
    with pytest.raises(LostReply):
        plan.after_send("lease.renew")


@pytest.mark.parametrize("text", ["lease", "lease.renew:0", "lease.renew:x", "Lease.Renew", "a.b.c", "a.b:1:2"])
def test_a_malformed_place_is_refused_by_name(text):
    with pytest.raises(InvalidSetting, match=re.escape(f"CRASH_AT='{text}'")):
        FaultPlan.parse({"CRASH_AT": text})


def test_places_in_the_source_are_literal_dotted_and_written_once():
    found = failpoints.declared_failpoints()
    twice = [place for place, times in collections.Counter(found).items() if times > 1]
    malformed = [name for _, name in found if not re.fullmatch(r"[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*", name)]
    assert not twice
    assert not malformed
