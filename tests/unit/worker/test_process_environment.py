"""The environment of a task process: each frame sees its own variables, and nothing of the frames before it."""

import os
import subprocess
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.worker.runners.environment import frame_variables
from rota.worker.runners.process_environment import ProcessEnvironment
from rota.worker.runners.process_messages import TaskProcessRequest

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
names = st.sampled_from(["COLOUR", "ROTA_FRAME", "CUDA_VISIBLE_DEVICES", "TRACEPARENT", "PATH"])
values = st.sampled_from(["", "1", "blue"])


@st.composite
def requests(draw):
    return TaskProcessRequest(
        1,
        "task",
        *(str(UUID(int=draw(st.integers(1, 2)))) for _ in range(2)),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 2)),
        None,
        draw(st.dictionaries(names, values, max_size=2)),
        tuple(draw(st.sets(st.integers(0, 1)))),
        draw(st.sampled_from(["", TRACE])),
    )


@pytest.fixture
def _same_environment():
    before, folder = dict(os.environ), Path.cwd()
    yield
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.usefixtures("_same_environment")
@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(requests(), st.dictionaries(names, st.none() | values, max_size=2)), max_size=5))
def test_frame_sees_its_own_variables_whatever_frames_before_it_had_and_changed(frames):
    before = dict(os.environ)
    environment = ProcessEnvironment(Path.cwd())
    for call, changes in frames:
        environment.enter(call)
        identity = frame_variables(call.job, call.layer, call.frame, call.attempt, call.gpus, call.trace)
        assert dict(os.environ) == before | call.env | identity
        assert {name: os.getenv(name) for name in identity} == identity
        for name, value in changes.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        environment.leave()
    environment.enter(plain := TaskProcessRequest(1, "task", "job", "layer", 7, 1, None, {}, ()))
    assert dict(os.environ) == before | frame_variables("job", "layer", 7, 1, ())
    assert plain.env == {}
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.usefixtures("_same_environment")
def test_working_directory_is_restored_also_when_it_was_removed(tmp_path):
    folder = Path.cwd()
    environment = ProcessEnvironment(folder)
    for gone in (False, True):
        environment.enter(TaskProcessRequest(1, "task", "job", "layer", 1, 1, None, {}, ()))
        (tmp_path / "other").mkdir()
        os.chdir(tmp_path / "other")
        if gone:
            (tmp_path / "other").rmdir()
        environment.leave()
        assert Path.cwd() == folder
        if not gone:
            (tmp_path / "other").rmdir()


@pytest.mark.usefixtures("_same_environment")
def test_variables_reach_programs_that_a_task_starts():
    environment = ProcessEnvironment(Path.cwd())
    for frame in (1, 2):
        environment.enter(TaskProcessRequest(1, "task", "job", "layer", frame, 1, None, {}, ()))
        assert subprocess.check_output(["printenv", "ROTA_FRAME"], text=True).strip() == str(frame)
        environment.leave()
