"""Spin models of the ledger: every quick run has its expected verdict, and the runner reports it faithfully."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

MODELS = Path(__file__).parents[3] / "models"


def load_runner():
    spec = importlib.util.spec_from_file_location("rota_models_run", MODELS / "run.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


runner = load_runner()
needs_spin = pytest.mark.skipif(
    bool(runner.missing_tools()),
    reason=f"{' and '.join(runner.missing_tools())} not found: install it, such as by `apt-get install spin gcc`",
)
COMPLETE = "State-vector 96 byte, depth reached 109, errors: 0\n   114258 states, stored\n"


@needs_spin
@pytest.mark.parametrize("run", [run for run in runner.RUNS if run.quick], ids=lambda run: run.name)
def test_quick_model_run_has_its_expected_verdict(run):
    outcome = runner.check(run)
    assert runner.as_expected(run, outcome), outcome


@needs_spin
def test_unexpected_verdict_sets_the_exit_code(monkeypatch, capsys):
    wrong = runner.Run("one level checked", "-DBUG_ONE_LEVEL_CHECKED", "holds", quick=True)
    monkeypatch.setattr(runner, "RUNS", (wrong,))
    assert runner.main(["--quick"]) == 1
    assert "breaks A1" in capsys.readouterr().out


@needs_spin
def test_model_that_does_not_compile_raises():
    with pytest.raises(SystemExit, match="spin failed"):
        runner.check(runner.Run("torn", "-DTWICE(x)=}", quick=True))


def test_runner_without_spin_prints_one_notice_and_succeeds():
    bare = {**os.environ, "PATH": ""}
    done = subprocess.run(
        [sys.executable, MODELS / "run.py"], env=bare, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0
    assert done.stdout.count("\n") == 1
    assert "spin and cc not found" in done.stdout


@pytest.mark.parametrize(
    ("output", "verdict"),
    [
        (COMPLETE, "holds"),
        ("pan:1: assertion violated A2 (at depth 43)\nerrors: 1\n", "breaks A2"),
        ("pan:1: invalid end state (at depth 9)\nerrors: 1\n", "stuck"),
        ("Warning: Search not completed\n" + COMPLETE, "unfinished"),
        ("error: max search depth too small\n" + COMPLETE, "unfinished"),
        ("", "unfinished"),
    ],
)
def test_verdict_holds_only_after_a_complete_search(output, verdict):
    assert runner.verdict(runner.Run("any", ""), output) == verdict


def test_sampled_search_never_holds():
    sampled = runner.Run("any", "", "none found", sampled=True)
    assert runner.verdict(sampled, COMPLETE) == "none found"


@pytest.mark.parametrize("model", sorted(path.name for path in MODELS.glob("*.pml")))
def test_every_removable_rule_has_a_run_that_must_break(model):
    rules = set(re.findall(r"BUG_\w+", (MODELS / model).read_text())) - {"BUG_"}
    broken = [run.flags for run in runner.RUNS if run.expected == "breaks" and run.model == model]
    assert broken
    assert rules == set(re.findall(r"BUG_\w+", " ".join(broken)))


def test_model_run_names_are_unique():
    names = [run.name for run in runner.RUNS]
    assert sorted(set(names)) == sorted(names)


def test_rules_table_names_runs_that_break():
    rules = (MODELS / "README.md").read_text().partition("## Rules")[2].partition("Safe, too")[0]
    named = set(re.findall(r"`([^`]+)`", " ".join(re.findall(r"\|([^|]+)\|$", rules, re.MULTILINE))))
    assert named
    assert named <= {run.name for run in runner.RUNS if run.expected == "breaks"}


def test_runs_that_must_hold_remove_no_rule():
    assert not [run.name for run in runner.RUNS if run.expected != "breaks" and "BUG_" in run.flags]
