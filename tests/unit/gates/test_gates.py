"""Each gate goes red for the fault it is there for, and only for that."""

import subprocess

import pytest

from tests import gates
from tests.gates import tree as gates_tree
from tests.gates.process_logs import leaks
from tests.gates.tree import Report

HASHED = "msgspec==0.19 \\\n    --hash=sha256:" + "0a" * 32 + "\n"
LONG = "def long():\n" + "    x = 1\n" * 70
GOOD = {
    "src/rota/room.py": "def short():\n    return 1\n",
    "src/rota/room/migrations/0001_pre_room.sql": "SELECT 1;\n",
    "src/rota/other/migrations/0002_post_other.sql": "SELECT 1;\n",
    "requirements.lock": HASHED,
    "docs/how.md": "Connect to postgres://rota:password@localhost/rota, see https://example.org/work/simple-things.\n",
}
# Put together here, so that the gates do not find them in this file.
FAULTS = {
    "sizes": [
        {"src/rota/long.py": LONG},
        {"src/rota/method.py": "class A:\n" + "".join(f"    {line}\n" for line in LONG.splitlines())},
        {"src/rota/waits.py": "async " + LONG},
    ],
    "folders": [{f"src/rota/full/module{n}.py": "x = 1\n" for n in range(26)}],
    "class names": [
        {"src/rota/a/one.py": "class Page: ...\n", "src/rota/a/deep/two.py": "class Page: ...\n"},
        {f"src/rota/p{n}/one.py": "class Page: ...\n" for n in range(41)},
    ],
    "vague names": [
        {"src/rota/a.py": "class Te" + "ller: ...\n"},
        {"src/rota/a.py": "def job_to" + "ld(): ...\n"},
        {"src/rota/a.py": "def job(de" + "sk): ...\n"},
        {"src/rota/a.py": "class A:\n    def __init__(self):\n        self.se" + "en = 1\n"},
        {"src/rota/a.py": "WANT" + "ED_MAX = 1\n"},
        {"src/rota/do" + "or.py": "x = 1\n"},
    ],
    "SQL files": [{"src/rota/a/get.sql": "SELECT 1\n"}],
    "SQL writes": [
        {
            "src/rota/a/migrations/0003_pre_a.sql": "CREATE TABLE rota.thing (n int);\n",
            "src/rota/b/queries.sql": f"-- name: x\n-- Writes.\n{write} rota.thing\n",
        }
        for write in ("INSERT INTO", "UPDATE", "DELETE FROM")
    ],
    "phrases": [
        {"docs/page.md": ("This is for who" + "ever comes.\n") * 21},
        {"src/rota/a.py": ("# That is n" + "o page.\n") * 21},
    ],
    "unfinished": [
        {"src/rota/a.py": "# TO" + "DO later\n"},
        {"src/rota/queries.sql": "-- FIX" + "ME\n"},
        {"src/rota/a.py": "raise NotImplemented" + "Error\n"},
    ],
    "locks": [
        {"requirements.lock": HASHED + "--index" + "-url https://mirror.example\n"},
        {"requirements.lock": HASHED + "# from https://mirror.example\n"},
        {"requirements.lock": HASHED + "nats-py==2.9\n"},
        {"requirements.lock": HASHED + "nats-py==2.9 --hash=sha256:12\n"},
        {"requirements.lock": HASHED + "nats-py>=2.9 --hash=sha256:" + "0a" * 32 + "\n"},
        {"requirements-setup.lock": "uv==0.9\n"},
        {"requirements.lock": None},
        {"uv.lock": "version = 1\n"},
    ],
    "places": [
        {"README.md": "cd /" + "work/main\n"},
        {"README.md": "log = '/" + "root/.cache/x'\n"},
        {"deep/below/a.txt": "HOME=/" + "home/somebody/x\n"},
        {"a.toml": "url = 'https://mirror.example/" + "simple/'\n"},
        {"a.toml": "https://files.python" + "hosted.org/packages\n"},
    ],
    "secrets": [
        {"key.pem": "-----BEGIN RSA PRI" + "VATE KEY-----\n"},
        {"a.env": "AKI" + "AIOSFODNN7EXAMPLE\n"},
        {"a.env": "ghp_" + "a1B2" * 9 + "\n"},
        {"a.yaml": 'password: "' + "hT7w" * 6 + '"\n'},
        {"a.py": "API_KEY = '" + "hT7w" * 6 + "'\n"},
        {"a.md": "redis://:" + "hT7w" * 5 + "@host\n"},
        {"a.txt": "eyJ" + "hbGciOiJIUzI1" + ".eyJ" + "zdWIiOiIxMjM0" + ".x\n"},
    ],
    "migrations": [
        {"src/rota/third/migrations/0002_pre_third.sql": "SELECT 1;\n"},
        {"src/rota/third/migrations/3_third.sql": "SELECT 1;\n"},
    ],
}  # fmt: skip
TREE_GATES = {name: gates.GATES[name] for name in FAULTS}


@pytest.fixture
def tree(tmp_path):
    def plant(changes):
        for name, text in changes.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True) if text is None else path.write_text(text)
        return tmp_path

    plant(GOOD)
    return plant


@pytest.mark.parametrize("gate", TREE_GATES)
def test_a_good_tree_passes(tree, gate):
    assert TREE_GATES[gate](tree({})).problems == []


@pytest.mark.parametrize(("gate", "changes"), [(gate, changes) for gate, many in FAULTS.items() for changes in many])
def test_a_planted_fault_turns_its_gate_red_and_no_other(tree, gate, changes):
    root = tree(changes)
    red = [name for name, check in TREE_GATES.items() if check(root).problems]
    assert gate in red
    # An address in a lock is rightly found twice.
    assert set(red) <= {gate, "places"}


def test_problems_say_where(tree):
    root = tree({"src/rota/a.py": "x = 1\n# TO" + "DO later\n"})
    assert gates_tree.unfinished(root).problems == ["src/rota/a.py:2: # TO" + "DO later"]


def test_a_found_secret_is_not_repeated(tree):
    value = "hT7w" * 6
    (problem,) = gates_tree.secrets(tree({"a.yaml": f'token: "{value}"\n'})).problems
    assert problem == "a.yaml:1: looks like a password"


def test_binary_files_are_no_text(tree, tmp_path):
    (tmp_path / "a.png").write_bytes(b"\x89PNG\0/" + b"root/x")
    assert gates_tree.places(tmp_path).problems == []


def test_ignored_files_do_not_count_without_git(tree):
    root = tree(
        {".gitignore": "# what we make\n.venv/\n*.log\n", ".venv/x.py": "/" + "root/x", "a.log": "/" + "root/x"}
    )
    assert gates_tree.places(root).problems == []
    assert gates_tree.places(tree({"b.txt": "/" + "root/x"})).problems


def test_in_a_repository_new_files_count_and_ignored_ones_do_not(tree):
    root = tree({".gitignore": "/made/\n", "made/a.txt": "/" + "root/x", "new.txt": "/" + "root/x"})
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    assert [problem.split(":")[0] for problem in gates_tree.places(root).problems] == ["new.txt"]


def test_the_size_report_shows_medians_against_the_style(tree):
    note = gates_tree.sizes(tree({"src/rota/b.py": "def f():\n    x = 1\n    return x\n"})).note
    assert note.startswith("2 files, median 2 lines (style 40-250); 2 functions, median 2 (5-9)")


def test_the_run_is_red_if_one_gate_is_and_shows_its_problem(tree, capsys):
    chosen = {"good": lambda _root: Report(note="fine"), "bad": lambda _root: Report(["a.py:1: wrong"])}
    assert gates.main([], tree({}), chosen) == 1
    shown = capsys.readouterr().out
    assert "FAIL  bad" in shown
    assert "      a.py:1: wrong" in shown
    assert "2 gates, 1 failed" in shown
    assert gates.main(["good"], tree({}), chosen) == 0


def test_a_gate_that_breaks_has_not_passed(tree, capsys):
    def breaks(_root):
        raise OSError("no disk")

    assert gates.main([], tree({}), {"broken": breaks}) == 1
    assert "OSError: no disk" in capsys.readouterr().out


def test_an_unknown_gate_is_named_with_those_that_exist(capsys):
    assert gates.main(["typos"]) == 2
    assert "No gate typos; there are types" in capsys.readouterr().out


def test_a_program_that_is_missing_or_fails_is_red(tmp_path):
    assert "could not run" in gates.command("no-such-program")(tmp_path).problems[0]
    assert gates.command("python", "-c", "raise SystemExit('wrong')")(tmp_path).problems == ["wrong"]
    assert gates.command("python", "-c", "")(tmp_path).problems == []


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("to redis://:s3c /ä@host", "plain"),
        ("to redis://:s3c%20%2F%C3%A4@host", "percent-encoded"),
        ("body s3c+%2F%C3%A4", "form-encoded"),
        ('{"x":"s3c /\\u00e4"}', "in JSON"),
        ("Basic czNjIC/DpA==", "base64"),
    ],
)
def test_a_secret_in_a_log_is_found_in_each_disguise_and_not_repeated(text, form):
    assert leaks(f"fine\n{text}\n", {"the password": "s3c /ä"}) == [f"line 2 holds the password ({form})"]


def test_a_clean_log_has_no_leaks():
    assert leaks("to redis://:***@host\n", {"the password": "s3c /ä"}) == []
