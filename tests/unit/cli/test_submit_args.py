"""`rota submit --file`: the submission in a YAML or JSON file, and errors with file and line."""

import json
import os
import threading
from datetime import UTC, datetime

import pytest

from rota.cli.jobs.submit_args import SubmitArgs, build_submission
from rota.model.errors import InvalidInput
from rota.model.jobs.submission import LayerSpec, RetrySpec, Submission


def submission_of(folder, text, name="job.yaml"):
    path = folder / name
    path.write_text(text)
    return build_submission(SubmitArgs(file=path), "ann")


def refusal(folder, text):
    with pytest.raises(InvalidInput) as refused:
        submission_of(folder, text)
    return refused.value.sentence.removeprefix(f"{folder}/")


def test_submission_file_is_read_with_types(tmp_path):
    text = """
    name: yes-men
    run_at: 2030-01-31T12:00:00Z
    labels: {release: "010", 7: seven}
    layers:
      - task: train
        cores: 0.5
        frames: 1-10
        fail_fast: true
        retries: {most: 2, on: [error]}
        items: [{kwargs: {rate: .inf, steps: 10, small: 1e-07, big: 18446744073709551615, none: ~, text: "on"}}]
    """
    values = {"rate": float("inf"), "steps": 10, "small": 1e-7, "big": 2**64 - 1, "none": None, "text": "on"}
    assert submission_of(tmp_path, text) == Submission(
        show="default",
        actor_id="ann",
        actor_type="human",
        name="yes-men",
        run_at=datetime(2030, 1, 31, 12, tzinfo=UTC),
        labels={"release": "010", "7": "seven"},
        layers=(
            LayerSpec(
                task="train",
                cores=0.5,
                frames="1-10",
                fail_fast=True,
                retries=RetrySpec(most=2, on=frozenset({"error"})),
                items=[{"kwargs": values}],
            ),
        ),
    )


def test_json_submission_file_is_read_like_json(tmp_path):
    given = {"layers": [{"task": "a", "input": {"x": [1e-07, 1e22, -3, 0.25, True, None, "010\n\t\u00e9", {}]}}]}
    for indent in (None, 2):
        found = submission_of(tmp_path, json.dumps(given, indent=indent), "job.json")
        assert found.layers[0].input == given["layers"][0]["input"]


NUMBER = "is ambiguous: write a plain decimal number, or put it in quotes if it is text."
WORD = "is ambiguous: write true or false, or put it in quotes if it is text."


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layers:\n  - task: a\n    cores: 010", f"job.yaml:3: 010 {NUMBER}"),
        ("layers:\n  - task: a\n    cores: 0o10", f"job.yaml:3: 0o10 {NUMBER}"),
        ("layers:\n  - {task: a, gpus: 0x10}", f"job.yaml:2: 0x10 {NUMBER}"),
        ("layers:\n  - argv: [at, 12:30]", f"job.yaml:2: 12:30 {NUMBER}"),
        ("name: no\nlayers: []", f"job.yaml:1: no {WORD}"),
        ("layers:\n  - task: a\n    input:\n      flag: yes", f"job.yaml:4: yes {WORD}"),
        ("name: a\nlayers: []\nname: b", "job.yaml:3: 'name' is given twice."),
        ('{"layers": [\n{"task": "a",\n"task": "b"}]}', "job.yaml:3: 'task' is given twice."),
        ("layers:\n  - task: !!python/name:os.system a", "job.yaml:2: tags are not supported: put a value that"),
        ("name: &a x\nlayers: []", "job.yaml:1: anchors and aliases are not supported: write it out."),
        ("name: a\nlayers: [*a, *a]", "job.yaml:2: anchors and aliases are not supported: write it out."),
        ("name: a\n---\nname: b", "job.yaml:2: a second document begins here: keep one of them."),
        ("layers: " + "[" * 100_000, "job.yaml:1: this is nested deeper than 48."),
        ("name: a\nlayers: [", "this is neither YAML nor JSON: "),
        ("", "job.yaml:1: this is not a submission: write a mapping with fields such as show and layers."),
        ("\n- a", "job.yaml:2: this is not a submission: write a mapping"),
        ("show: a\nlayres: []", "job.yaml:2: this is not a valid submission: Object contains unknown field `layres`."),
        (
            "layers:\n  - task: a\n    max-gpus: 1",
            "job.yaml:3: this is not a valid submission: Object contains",
        ),
        (
            "layers:\n  - task: a\n    gpus: many",
            "job.yaml:3: this is not a valid submission: Expected `int`",
        ),
        ("name: a", "job.yaml:1: this is not a valid submission: Object missing required field `layers`."),
        (f"layers: [{{task: a, input: {2**70}}}]", "job.yaml is not a valid submission: "),
        (f"context: {'x' * 1_100_000}\nlayers: [{{task: a}}]", "put large inputs into the store"),
    ],
)
def test_invalid_submission_file_is_refused_with_its_line(tmp_path, text, message):
    sentence = refusal(tmp_path, text)
    assert message in sentence
    assert "\n" not in sentence


def test_submission_file_that_is_not_utf_8_is_refused_with_its_line(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_bytes("name: a\ntopic: é".encode("latin-1"))
    with pytest.raises(InvalidInput, match=r"job\.yaml:2: this is not UTF-8"):
        build_submission(SubmitArgs(file=path), "ann")


def test_submission_file_with_nested_aliases_is_refused_unexpanded(tmp_path):
    levels = [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 30)]
    text = "\n".join(["layers: []", "l0: &l0 lol", *levels])
    assert refusal(tmp_path, text).startswith("job.yaml:2: anchors and aliases are not supported")


def test_submission_file_may_be_a_pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=("layers: [{task: a}]",), daemon=True)
    writer.start()
    assert build_submission(SubmitArgs(file=path), "ann").layers == (LayerSpec(task="a"),)
    writer.join()
