"""Each gate fails for the fault it checks, and for no other."""

import subprocess

import pytest

from tests import gates
from tests.gates import constructors as gates_constructors
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
# Concatenated, so that the gates do not find these strings in this file.
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
    "constructors": [
        {"src/rota/a.py": f"class A:\n    def __init__({parameters}) -> None: ...\n"}
        for parameters in (
            "self, a, b, c, d, e, f, g, h",
            "self, a, b, *, c, d, e=1, f=2, g=3, h=4",
            "self, a, /, b, c, d, e, f, *g, h",
            "self, a, b, c, d, e, f, g, **h",
        )
    ],
    "callbacks": [
        {"src/rota/a.py": "def join(service, notify):\n    service.on_change = notify\n"},
        {"src/rota/a.py": "class A:\n    def join(self, x):\n        self.service.on_change, self.n = x, 1\n"},
        {"src/rota/a.py": "def join(service, notify):\n    setattr(service, 'on_change', notify)\n"},
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
    "DDL locks": [
        {"src/rota/third/migrations/0003_pre_third.sql": "CREATE INDEX ON rota.job (pk_show);\n"},
        {"src/rota/third/migrations/0003_pre_third.sql": "ALTER TABLE rota.job ADD COLUMN x bigint NOT NULL;\n"},
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
def test_gate_passes_on_a_clean_tree(tree, gate):
    assert TREE_GATES[gate](tree({})).problems == []


@pytest.mark.parametrize(("gate", "changes"), [(gate, changes) for gate, many in FAULTS.items() for changes in many])
def test_gate_fails_on_its_planted_fault_and_other_gates_pass(tree, gate, changes):
    root = tree(changes)
    red = [name for name, check in TREE_GATES.items() if check(root).problems]
    assert gate in red
    # The places gate also reports URLs in lock files.
    assert set(red) <= {gate, "places"}


def test_constructor_with_seven_parameters_or_a_struct_with_more_fields_passes(tree):
    constructor = "class A:\n    def __init__(self, a, b, c, d, *, e, f, g=1) -> None: ...\n"
    fields = "".join(f"    field{n}: int\n" for n in range(9))
    root = tree({"src/rota/a.py": constructor, "src/rota/b.py": f"class B(msgspec.Struct):\n{fields}"})
    assert gates_constructors.constructors(root).problems == []


def test_own_callback_and_other_attributes_may_be_assigned(tree):
    own = "class A:\n    def __init__(self, on_end):\n        self.on_end = on_end\n"
    others = "def close(service):\n    service.over = True\n    service.once_more = 1\n    service.on_end()\n"
    assert gates_constructors.callbacks(tree({"src/rota/a.py": own, "src/rota/b.py": others})).problems == []


def test_problems_name_file_and_line(tree):
    root = tree({"src/rota/a.py": "x = 1\n# TO" + "DO later\n"})
    assert gates_tree.unfinished(root).problems == ["src/rota/a.py:2: # TO" + "DO later"]


def test_secrets_gate_does_not_repeat_the_secret(tree):
    value = "hT7w" * 6
    (problem,) = gates_tree.secrets(tree({"a.yaml": f'token: "{value}"\n'})).problems
    assert problem == "a.yaml:1: looks like a password"


def test_places_gate_skips_binary_files(tree, tmp_path):
    (tmp_path / "a.png").write_bytes(b"\x89PNG\0/" + b"root/x")
    assert gates_tree.places(tmp_path).problems == []


def test_places_gate_without_git_skips_ignored_files(tree):
    root = tree(
        {".gitignore": "# what we make\n.venv/\n*.log\n", ".venv/x.py": "/" + "root/x", "a.log": "/" + "root/x"}
    )
    assert gates_tree.places(root).problems == []
    assert gates_tree.places(tree({"b.txt": "/" + "root/x"})).problems


def test_places_gate_in_a_repository_checks_new_files_and_skips_ignored_ones(tree):
    root = tree({".gitignore": "/made/\n", "made/a.txt": "/" + "root/x", "new.txt": "/" + "root/x"})
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    assert [problem.split(":")[0] for problem in gates_tree.places(root).problems] == ["new.txt"]


def test_size_report_compares_medians_with_the_style_guide(tree):
    note = gates_tree.sizes(tree({"src/rota/b.py": "def f():\n    x = 1\n    return x\n"})).note
    assert note.startswith("2 files, median 2 lines (style 40-250); 2 functions, median 2 (5-9)")


def test_run_with_one_failed_gate_fails_and_prints_its_problem(tree, capsys):
    chosen = {"good": lambda _root: Report(note="fine"), "bad": lambda _root: Report(["a.py:1: wrong"])}
    assert gates.main([], tree({}), chosen) == 1
    shown = capsys.readouterr().out
    assert "FAIL  bad" in shown
    assert "      a.py:1: wrong" in shown
    assert "2 gates, 1 failed" in shown
    assert gates.main(["good"], tree({}), chosen) == 0


def test_gate_that_raises_fails(tree, capsys):
    def breaks(_root):
        raise OSError("no disk")

    assert gates.main([], tree({}), {"broken": breaks}) == 1
    assert "OSError: no disk" in capsys.readouterr().out


def test_unknown_gate_is_reported_with_the_known_ones(capsys):
    assert gates.main(["typos"]) == 2
    assert "No gate typos; there are types" in capsys.readouterr().out


def test_command_gate_fails_when_the_program_is_missing_or_fails(tmp_path):
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
def test_secret_in_a_log_is_found_in_each_encoding_and_not_repeated(text, form):
    assert leaks(f"fine\n{text}\n", {"the password": "s3c /ä"}) == [f"line 2 holds the password ({form})"]


def test_log_without_secrets_has_no_leaks():
    assert leaks("to redis://:***@host\n", {"the password": "s3c /ä"}) == []
