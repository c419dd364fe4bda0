"""What user code sees: tasks stay callable, apps are found by module or file, and a context always exists."""

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


def test_task_stays_callable():
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


async def test_bare_task_decorator_uses_the_name_of_the_function():
    app = Rota()

    @app.task
    async def ping():
        return "pong"

    assert (ping.name, ping.topic, ping.is_async, ping.work.cores) == ("ping", "ping", True, 10)
    assert await ping() == "pong"


@pytest.mark.parametrize(
    ("options", "message"),
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
def test_invalid_task_options_are_refused_with_a_reason(options, message):
    app = Rota()
    app.task(name="there")(print)
    with pytest.raises(InvalidInput, match=message):
        app.task(**options)(print)
    assert list(app.tasks) == ["there"]


def test_context_outside_a_frame_is_a_no_op():
    context = rota.context()
    context.progress(50)
    context.log("ignored")
    context.check()
    assert (context.frame, context.attempt, context.job.int, context.cancelled) == (0, 0, 0, False)


def test_context_reports_progress_and_logs_of_its_frame_within_bounds():
    records = []

    class RecordingSink:
        def progress(self, *args):
            records.append(args)

        def log(self, *args):
            records.append(args)

    context = Context(type("AssignedRange", (), {"job": 1, "layer": 2, "attempt": 3}), 4, 5, RecordingSink())
    inside = copy_context()
    inside.run(CURRENT_CONTEXT.set, context)
    assert inside.run(rota.context) is context
    assert (context.job, context.layer, context.attempt, context.frame) == (1, 2, 3, 4)
    context.progress(150, "far")
    context.progress(-1)
    context.log("line")
    assert records == [(5, 100.0, "far"), (5, 0.0, ""), (5, "line")]
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
def test_app_is_loaded_from_a_module_or_a_file(apps, spec):
    assert isinstance(load_app.load(spec, apps), Rota)


@pytest.mark.parametrize(
    ("spec", "message"),
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
def test_missing_app_is_refused_with_a_reason(apps, spec, message):
    with pytest.raises(InvalidInput, match=message):
        load_app.load(spec, apps)


def test_importing_rota_loads_no_dependencies():
    code = "import sys, rota; assert not {'msgspec', 'rota.sdk'} & set(sys.modules); from rota import Rota, Fatal"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
    with pytest.raises(AttributeError):
        _ = rota.nothing_like_that
