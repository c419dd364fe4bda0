"""Artifacts: named by tasks or by layer patterns; each is stored or its frame fails."""

import sys
from pathlib import Path

import msgspec
import pytest

from rota import context
from rota.model.protocol import AttemptStatus
from rota.worker.data.blob_store import FileStore
from tests.integration.worker.worker_support import command, serving, task, workers
from tests.support.waiting import until

SMALL, LARGE = 1000, 100_000
KINDS = [pytest.param("leaves", id="async"), pytest.param("leaves_sync", id="sync")]


@pytest.fixture
async def server(nats_url, bus_prefix):
    async with serving(nats_url, bus_prefix) as running:
        yield running


@pytest.fixture
async def start(nats_url, bus_prefix, server, tmp_path):
    async with workers(nats_url, bus_prefix, server, tmp_path / "work") as factory:
        yield factory


@pytest.fixture
def store(tmp_path):
    return FileStore(tmp_path / "store", most_bytes=1_000_000)


def sizes(end, store=None):
    """Artifact sizes by name, of inline files and of files in the store."""
    assert end.status is AttemptStatus.SUCCEEDED, (end.code, end.error)
    return {each.name: len(store.get(each.pointer) if each.pointer else each.data) for each in end.artifacts}


async def directories_removed(tmp_path):
    """Wait until every frame directory is removed."""
    await until(lambda: not list((tmp_path / "work").glob("*")), what="an empty work directory")


@pytest.mark.parametrize("name", KINDS)
async def test_small_files_are_sent_inline_and_the_frame_directory_is_removed(server, start, tmp_path, name):
    await start()
    end = await server.run(name, args=[{"a.txt": SMALL, "out/b.txt": 0}, "value"])
    assert sizes(end) == {"a.txt": SMALL, "out/b.txt": 0}
    assert msgspec.msgpack.decode(end.value) == "value"
    await directories_removed(tmp_path)


@pytest.mark.parametrize("name", [*KINDS, "leaves_later"])
async def test_large_files_are_put_in_the_store(server, start, store, name):
    await start(store=store)
    end = await server.run(name, args=[{"a": SMALL, "b": LARGE}])
    assert sizes(end, store) == {"a": SMALL, "b": LARGE}
    assert [bool(each.pointer) for each in end.artifacts] == [False, True]
    assert end.value is None


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("files", "code", "message"),
    [
        ({"a": LARGE}, "artifact_too_large", "100000 bytes: set store.directory for more than 65536"),
        ({f"f{n}": 60_000 for n in range(6)}, "artifact_too_large", "262144 together"),
        ({"a": -1}, "artifact_missing", "or was removed"),
        ({f"f{n}": 0 for n in range(101)}, "artifact_too_large", "101 artifacts: at most 100"),
    ],
)
async def test_unstorable_artifact_fails_its_frame_with_a_reason(server, start, tmp_path, name, files, code, message):
    running = await start()
    end = await server.run(name, args=[files])
    assert (end.status, end.code, end.artifacts) == (AttemptStatus.FAILED, code, ())
    assert message in end.error
    await directories_removed(tmp_path)
    assert sizes(await server.run(name, args=[{"a": 1}])) == {"a": 1}
    assert not running.task.done()


async def test_file_over_the_store_limit_fails_its_frame_and_stores_nothing(server, start, tmp_path):
    await start(store=FileStore(tmp_path / "store", most_bytes=80_000))
    end = await server.run("leaves", args=[{"a": LARGE}])
    assert (end.status, end.code) == (AttemptStatus.FAILED, "artifact_too_large")
    assert "larger than 80000 bytes" in end.error
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []


async def test_unusable_store_fails_the_frame(server, start, tmp_path):
    (tmp_path / "store").write_text("a file")
    await start(store=FileStore(tmp_path / "store"))
    end = await server.run("leaves", args=[{"a": LARGE}])
    assert (end.status, end.code) == (AttemptStatus.FAILED, "artifact_not_stored")


@pytest.mark.parametrize("name", ["../a", "/a", "a//b", "a\nb", "x" * 201])
async def test_invalid_artifact_name_is_refused(server, start, tmp_path, name):
    await start()
    end = await server.run("leaves_elsewhere", args=[str(tmp_path / "f"), name])
    assert (end.status, end.code) == (AttemptStatus.FAILED, "exception")
    assert "is not a valid artifact name" in end.error


async def test_artifact_outside_the_frame_directory_is_named_after_its_last_path_part(server, start, tmp_path):
    await start()
    (tmp_path / "f").write_text("x")
    assert sizes(await server.run("leaves_elsewhere", args=[str(tmp_path / "f"), ""])) == {"f": 1}
    assert sizes(await server.run("leaves_elsewhere", args=[str(tmp_path / "f"), "out/g"])) == {"out/g": 1}


@pytest.mark.parametrize("fail", [False, True])
async def test_frame_directory_is_removed_however_the_frame_ends(server, start, tmp_path, fail):
    await start()
    end = await server.run("opens_its_folder", args=[fail])
    assert end.status is (AttemptStatus.FAILED if fail else AttemptStatus.SUCCEEDED)
    assert end.artifacts == ()
    await directories_removed(tmp_path)


async def test_frames_with_and_without_artifacts_are_reported_correctly_side_by_side(server, start):
    await start()
    left = await server.send("leaves", 20, args=[{"a": 3}])
    plain = await server.send("nothing", 200)
    assert [sizes(end) for end in await server.ended(left, 20)] == [{"a": 3}] * 20
    assert await server.ended(plain, 200) == [None] * 200


SCRIPT = """
import os, pathlib
pathlib.Path('out').mkdir(); pathlib.Path('out/a.txt').write_text('a' * 10)
pathlib.Path('out/b.txt').write_text('b' * 100_000); pathlib.Path('c.log').write_text('c')
os.symlink('/etc/passwd', 'out/passwd.txt'); os.mkfifo('out/pipe.txt')
"""


async def test_command_artifacts_match_the_layer_patterns_and_exclude_links(server, start, store, tmp_path):
    await start(store=store)
    work = command(sys.executable, "-c", SCRIPT, artifacts=("out/*.txt", "*"))
    end = await server.run(work, args=[1])
    assert sizes(end, store) == {"out/a.txt": 10, "out/b.txt": 100_000, "c.log": 1}
    await directories_removed(tmp_path)


async def test_command_without_its_declared_artifacts_fails(server, start):
    await start()
    end = await server.run(command("true", artifacts=("out/*.png",)))
    assert (end.status, end.code) == (AttemptStatus.FAILED, "artifact_missing")
    assert "matches 'out/*.png'" in end.error
    end = await server.run(command("false", artifacts=("out/*.png",)))
    assert end.code == "exit_status", "its own failure takes precedence"


async def test_artifact_patterns_apply_to_tasks(server, start):
    await start()
    end = await server.run(task("opens_its_folder", artifacts=("scr*",)), args=[False])
    assert sizes(end) == {"scratch": 1}
    end = await server.run(task("nothing", artifacts=("scr*",)))
    assert (end.status, end.code) == (AttemptStatus.FAILED, "artifact_missing")


def test_artifact_call_outside_a_worker_does_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    context().artifact("nowhere")
    assert context().folder == Path.cwd()
