"""What user code sees: tasks are plain callables, apps are found by what people type, a context is always there."""

import subprocess
import sys
from contextvars import copy_context

import pytest

import rota
from rota import Cancelled, Context, Rota, Task
from rota.model.errors import InvalidInput
from rota.model.jobs.work import Retries
from rota.sdk import load_app
from rota.sdk.context import CURRENT_CONTEXT


def test_a_task_is_still_the_function():
    app = Rota()

    @app.task(name="render", topic="film", cores=0.5, gpus=1, memory="1.5GiB", retries=3, timeout="10min", kill_after=1)
    def render(scene, frame=1):
        """Renders."""
        return f"{scene}:{frame}"

    assert isinstance(render, Task)
    assert (render("a", frame=2), render.__name__, render.__doc__) == ("a:2", "render", "Renders.")
    assert app.tasks == {"render": render}
    work = render.work
    assert (work.task, work.cores, work.gpus, work.memory_mb, work.timeout_s) == ("render", 50, 1, 1536, 600.0)
    assert (work.retries, work.kill_after_s, render.topic, render.is_async) == (Retries(most=3), 1.0, "film", False)


async def test_a_bare_decorator_takes_the_functions_name():
    app = Rota()

    @app.task
    async def ping():
        return "pong"

    assert (ping.name, ping.topic, ping.is_async, ping.work.cores) == ("ping", "ping", True, 100)
    assert await ping() == "pong"


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"name": "no spaces"}, "not a valid task name"),
        ({"name": "there"}, "Task 'there' is declared twice"),
        ({"cores": "many"}, "not a valid amount of cores"),
        ({"gpus": -1}, "requests -1 GPUs"),
        ({"memory": "much"}, "not a valid amount of memory"),
        ({"timeout": -1}, "is not a valid duration"),
        ({"timeout": float("inf")}, "is not a valid duration"),
    ],
)
def test_what_a_task_cannot_be_is_told_in_a_sentence(wanted, says):
    app = Rota()
    app.task(name="there")(print)
    with pytest.raises(InvalidInput, match=says):
        app.task(**wanted)(print)
    assert list(app.tasks) == ["there"]


def test_outside_of_a_frame_the_context_is_nobodys():
    context = rota.context()
    context.progress(50)
    context.log("nobody hears")
    context.check()
    assert (context.frame, context.attempt, context.job.int, context.cancelled) == (0, 0, 0, False)


def test_a_context_tells_its_own_frame_within_bounds():
    told = []

    class Ear:
        def progress(self, *said):
            told.append(said)

        def log(self, *said):
            told.append(said)

    context = Context(type("Portion", (), {"job": 1, "layer": 2, "attempt": 3}), 4, 5, Ear())
    inside = copy_context()
    inside.run(CURRENT_CONTEXT.set, context)
    assert inside.run(rota.context) is context
    assert (context.job, context.layer, context.attempt, context.frame) == (1, 2, 3, 4)
    context.progress(150, "far")
    context.progress(-1)
    context.log("line")
    assert told == [(5, 100.0, "far"), (5, 0.0, ""), (5, "line")]
    context.cancelled = True
    with pytest.raises(Cancelled):
        context.check()


@pytest.fixture
def apps(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "one_app.py").write_text("from rota import Rota\nimport beside_app\napp = Rota()\nother = 3\n")
    (tmp_path / "beside_app.py").write_text("from rota import Rota\nfirst = Rota()\nsecond = Rota()\n")
    (tmp_path / "no_app.py").write_text("x = 1\n")
    (tmp_path / "broken_app.py").write_text("1 / 0\n")
    yield tmp_path
    for name in ("one_app", "beside_app", "no_app", "broken_app"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("spec", ["one_app:app", "one_app", "one_app.py", "./one_app.py:app"])
def test_an_app_is_found_as_a_module_or_a_file(apps, spec):
    assert isinstance(load_app.load(spec, apps), Rota)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("nowhere:app", "Cannot import 'nowhere:app'"),
        ("nowhere.py", "There is no file"),
        ("one_app:other", "no app 'other'"),
        ("one_app:missing", "no app 'missing'"),
        ("beside_app", "beside_app:first, beside_app:second"),
        ("no_app", "has no `Rota"),
        ("broken_app", r"failed \(ZeroDivisionError"),
        ("", "is not a valid app"),
        ("a/b:app", "is not a valid app"),
        (".x", "is not a valid app"),
    ],
)
def test_an_app_that_is_not_there_is_told_in_a_sentence(apps, spec, says):
    with pytest.raises(InvalidInput, match=says):
        load_app.load(spec, apps)


def test_import_rota_loads_nothing():
    code = "import sys, rota; assert not {'msgspec', 'rota.sdk'} & set(sys.modules); from rota import Rota, Fatal"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
    with pytest.raises(AttributeError):
        _ = rota.nothing_like_that
