"""What a layer runs, as the API shows it."""

import os
import subprocess
import sys

import msgspec

from rota.model.jobs.work import ProcessLimits, Retries, Work, work_view

SCRIPT = """
import msgspec
from rota.model.jobs.work import Retries, Work, work_view
work = Work(task="t", retries=Retries(most=2, on=frozenset({"timeout", "error", "lost"})))
print(msgspec.json.encode(work_view(work)).decode())
"""


def test_fields_have_names_and_the_values_of_the_work():
    work = Work(task="t", argv=("a",), env={"A": "1"}, cores=250, limits=ProcessLimits(cpu_s=3), fail_fast=True)
    shown = msgspec.json.decode(msgspec.json.encode(work_view(work)))
    assert set(shown) == set(Work.__struct_fields__)
    assert (shown["cores"], shown["limits"]["cpu_s"], shown["retries"]["on"]) == (250, 3, ["error", "timeout"])
    assert set(shown["retries"]) == set(Retries.__struct_fields__)


def test_processes_with_different_hash_seeds_show_the_same():
    answers = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3", "4")
    }
    assert len(answers) == 1
