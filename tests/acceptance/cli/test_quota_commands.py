"""Quota commands of operators: shows, pools, subscriptions and caps."""

import asyncio
import json
import os
import pwd
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest

from rota.accounting.admin import QuotaAdmin
from rota.accounting.ledger import BookingGroup, Charge
from rota.accounting.service import AccountingService
from rota.cli.core.tables import usage_bar
from rota.cli.main import main
from rota.cli.quota import cap_commands
from rota.cli.quota import commands as quota_commands
from tests.contract.ledger_suite import sql

ROTA = str(Path(sys.executable).with_name("rota"))
ME = f"cli:{pwd.getpwuid(os.getuid()).pw_name}"
AUDIT = sql("SELECT actor, action, target, detail FROM rota.audit ORDER BY seq")


@pytest.fixture
def urls(monkeypatch, tmp_path, database_url, redis_url):
    """Server URLs in the environment of the command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROTA_POSTGRES_URL", database_url)
    monkeypatch.setenv("ROTA_REDIS_URL", redis_url)


@pytest.fixture
def rota(monkeypatch, capsys, urls):
    """Runs `rota …` in this process and returns its status, output and errors."""

    async def run(*args):
        monkeypatch.setattr(sys, "argv", ["rota", *args])
        status = await asyncio.to_thread(_status)
        result = capsys.readouterr()
        assert "Traceback" not in result.err
        assert "This should not happen" not in result.err, result.err
        return SimpleNamespace(status=status, out=result.out, err=result.err)

    return run


def _status():
    """Runs in a thread, because the command starts its own event loop."""
    try:
        main()
    except SystemExit as ended:
        return ended.code
    return 0


@pytest.fixture
def cli(rota):
    """Runs a command line that must succeed; returns its output."""

    async def run(line):
        result = await rota(*line.split())
        assert result.status == 0, result.err
        return result.out

    return run


@pytest.fixture
async def show_cli(cli, database):
    """`cli` with a show that has a subscription, a folder and a department."""
    admin = QuotaAdmin(database)
    await admin.create_show("duck", actor="ann")
    await admin.create_pool("main", actor="ann")
    await admin.create_dept("fx", actor="ann")
    await admin.create_subscription("duck", "main", size=10, burst=20, actor="ann")
    await admin.create_folder("duck", "shots", actor="ann")
    await admin.create_point("duck", "fx", actor="ann")
    return cli


async def book(accounting, tokens, *, cores=100, gpus=0, show="duck"):
    admin = accounting.admin
    [share], [folder], [point] = await admin.subscriptions(show), await admin.folders(show), await admin.points(show)
    found = await admin.show(show)
    charge = Charge(share.id, folder.id, found.id, found.id, point.id, cores, gpus)
    [outcome] = await accounting.book(found.id, [BookingGroup(charge, uuid4(), tokens)])
    assert list(outcome.booked) == list(tokens)


async def audit_entries(database):
    return [(row["actor"], row["action"], row["target"]) for row in await database.rows(AUDIT)]


def table_rows(text):
    """Lines without table padding."""
    return [" ".join(line.split()) for line in text.splitlines()]


async def test_show_setup_is_reflected_in_info_and_list_tables(cli, database):
    assert await cli("show create duck") == "Created show duck; accounting in PostgreSQL.\n"
    assert "no subscription, so none of its jobs can run: `rota sub create duck" in await cli("show info duck")
    assert await cli("pool create main") == "Created pool main.\n"
    made = await cli("sub create duck main --size 100 --burst 150%")
    assert made == "Created subscription main of show duck: size 100, burst 150, GPU burst unlimited.\n"
    await cli("folder create duck shots --max-cores 64 --max-gpus 4")
    await cli("dept create fx")
    await cli("dept add duck fx --min-cores 0.5 --max-cores 20")
    await book(AccountingService(database, None), range(25), cores=50, gpus=0)
    info = table_rows(await cli("show info duck"))
    show = await QuotaAdmin(database).show("duck")
    assert info == [
        f"duck: accounting in PostgreSQL (fence {show.fence}, id {show.id}).",
        "",
        "pool size burst used of burst GPUs",
        "main 100 150 12.5 █░░░░░░░░░│░░░░░░ 8 % 0 of unlimited",
        "",
        "folder min max used of max GPUs",
        "shots 0 64 12.5 ███░░░░░░░░░░░░░│ 19 % 0 of 4",
        "",
        "dept min max used of max GPUs",
        "fx 0.5 20 12.5 ██████████░░░░░░│ 62 % 0 of unlimited",
    ]
    assert table_rows(await cli("show list"))[1] == f"duck PostgreSQL {show.fence} 100 150 12.5 █░░░░░░░░░│░░░░░░ 8 %"
    assert table_rows(await cli("pool list"))[1] == "main 100 150 12.5 duck"
    assert table_rows(await cli("dept list"))[1] == "fx duck"
    assert table_rows(await cli("sub list duck")) == info[2:4]
    assert table_rows(await cli("folder list duck")) == info[5:7]
    assert table_rows(await cli("dept list duck")) == info[8:10]


async def test_quota_commands_print_the_same_data_as_json(show_cli, database):
    await show_cli("sub set duck main --size 2.5 --gpu-burst 3")
    await show_cli("folder set duck shots --max-cores 0.29")
    info = json.loads(await show_cli("show info duck --json"))
    [share] = info["subscriptions"]
    assert share.items() >= {"name": "main", "size": 2.5, "burst": 20, "gpu_burst": 3, "used_cores": 0}.items()
    assert (info["folders"][0]["max_cores"], info["folders"][0]["max_gpus"]) == (0.29, -1)
    assert (info["managed"], info["use_is_live"], info["depts"][0]["name"]) == (False, True, "fx")
    assert json.loads(await show_cli("sub list duck --json")) == info["subscriptions"]
    assert json.loads(await show_cli("folder list duck --json")) == info["folders"]
    assert json.loads(await show_cli("dept list duck --json")) == info["depts"]
    [show], [pool], [dept] = [json.loads(await show_cli(f"{each} list --json")) for each in ("show", "pool", "dept")]
    assert (show["name"], show["size"], pool["shows"], dept["shows"]) == ("duck", 2.5, ["duck"], ["duck"])
    change = json.loads(await show_cli("sub set duck main --size 30 --json"))
    assert (change["changed"], change["before"]["size"], change["after"]["size"]) == (True, 2.5, 30)
    assert len(change["notes"]) == 1
    assert json.loads(await show_cli("sub set duck main --size 30 --json"))["changed"] is False


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        ("sub set duck main --burst 150%", "burst 15 (was 20)"),
        ("sub set duck main --burst 12.5%", "burst 1.25 (was 20)"),
        ("sub set duck main --size 40 --burst 200%", "size 40 (was 10), burst 80 (was 20)"),
        ("sub set duck main --burst 999999%", "burst 99999.9 (was 20)"),
        ("sub set duck main --burst 0", "burst 0 (was 20)"),
        ("sub set duck main --gpu-burst 0", "GPU burst 0 (was unlimited)"),
        ("folder set duck shots --max-cores 0.5", "max cores 0.5 (was unlimited)"),
        ("folder set duck shots --min-cores 1 --max-gpus 2", "min cores 1 (was 0), max GPUs 2 (was unlimited)"),
        ("dept set duck fx --max-cores 21474836.47", "max cores 21474836.47 (was unlimited)"),
    ],
)
async def test_quota_change_prints_new_and_old_values(show_cli, line, printed):
    assert f": {printed}.\n" in await show_cli(line)


async def test_unlimited_is_accepted_as_a_cap_value(show_cli):
    await show_cli("folder set duck shots --max-cores 5 --max-gpus 5")
    printed = await show_cli("folder set duck shots --max-cores unlimited --max-gpus unlimited")
    assert "max cores unlimited (was 5), max GPUs unlimited (was 5)" in printed
    await show_cli("folder set duck shots --max-cores 5")
    assert "max cores unlimited (was 5)" in await show_cli("folder set duck shots --max-cores -1")


async def test_cap_below_current_usage_is_set_with_a_note(show_cli, database):
    await book(AccountingService(database, None), range(8), gpus=1)
    assert "8 cores are in use, above this limit: they continue" in await show_cli("sub set duck main --burst 7.5")
    assert "in use" not in await show_cli("sub set duck main --burst 8")
    assert "8 GPUs are in use" in await show_cli("dept set duck fx --max-gpus 1")
    assert table_rows(await show_cli("dept list duck"))[1].endswith("8 of 1")


async def test_size_above_burst_prints_a_note(show_cli):
    assert "Its size is above its burst" in await show_cli("sub set duck main --size 21")
    assert "Its size" not in await show_cli("sub set duck main --size 20")


async def test_unchanged_quota_is_reported_and_not_audited(show_cli, database):
    entries = await audit_entries(database)
    assert (await show_cli("sub set duck main --burst 20")).startswith(
        "Nothing changed: subscription main of show duck"
    )
    assert (await show_cli("show set-managed duck false")).startswith(
        "Nothing changed: the accounting of show duck is already in PostgreSQL"
    )
    assert await audit_entries(database) == entries


async def test_quota_changes_are_audited_under_the_os_user(show_cli, database, monkeypatch):
    monkeypatch.setenv("USER", "mallory")
    monkeypatch.setenv("LOGNAME", "mallory")
    await book(AccountingService(database, None), [1])
    show = await QuotaAdmin(database).show("duck")
    began = len(await audit_entries(database))
    for line in (
        "sub set duck main --burst 30",
        "folder set duck shots --max-cores 3",
        "dept set duck fx --max-cores 3",
        f"job set duck {show.id} --max-cores 2",
        f"layer set duck {show.id} --max-gpus 2",
        "show set-managed duck true",
        "show set-managed duck false",
    ):
        await show_cli(line)
    await AccountingService(database, None).release(show.id, [1])
    for line in (
        "folder rename duck shots assets",
        "folder delete duck assets",
        "sub delete duck main",
        "dept remove duck fx",
        "pool rename main big",
        "pool delete big",
        "dept rename fx sims",
        "dept delete sims",
        "show rename duck drake",
        "show delete drake",
    ):
        await show_cli(line)
    found = (await audit_entries(database))[began:]
    assert {actor for actor, _, _ in found} == {ME}
    assert [f"{action} {target}" for _, action, target in found] == [
        "subscription.change subscription:duck/main",
        "folder.change folder:duck/shots",
        "point.change point:duck/fx",
        f"job.change job:duck/{show.id}",
        f"layer.change layer:duck/{show.id}",
        "show.set_managed show:duck",
        "show.set_managed show:duck",
        "folder.rename folder:duck/assets",
        "folder.delete folder:duck/assets",
        "subscription.delete subscription:duck/main",
        "point.delete point:duck/fx",
        "pool.rename pool:big",
        "pool.delete pool:big",
        "dept.rename dept:sims",
        "dept.delete dept:sims",
        "show.rename show:drake",
        "show.delete show:drake",
    ]


async def test_set_managed_moves_accounting_to_redis_and_back(show_cli):
    assert await show_cli("show set-managed duck true") == "The accounting of show duck is now in Redis.\n"
    assert "the accounting of show duck is already in Redis" in await show_cli("show set-managed duck TRUE")
    assert table_rows(await show_cli("show list"))[1].startswith("duck Redis ")
    assert await show_cli("show set-managed duck false") == "The accounting of show duck is now in PostgreSQL.\n"
    assert await show_cli("show create goose --managed") == "Created show goose; accounting in Redis.\n"


async def test_managed_show_usage_is_read_from_redis(show_cli, database, redis):
    await show_cli("show set-managed duck true")
    await book(AccountingService(database, redis), range(5))
    assert table_rows(await show_cli("sub list duck")) == [
        "pool size burst used of burst GPUs",
        "main 10 20 5 ████░░░░│░░░░░░░░ 25 % 0 of unlimited",
    ]
    await redis.flushdb()
    assert (
        table_rows(await show_cli("sub list duck"))[-1]
        == "Usage is as of the last reconciliation: Redis does not answer."
    )
    assert json.loads(await show_cli("show info duck --json"))["use_is_live"] is False


async def test_quota_change_without_redis_is_committed_with_a_warning(show_cli, rota, monkeypatch, database):
    await show_cli("show set-managed duck true")
    monkeypatch.setenv("ROTA_REDIS_URL", "redis://127.0.0.1:1")
    result = await rota("sub", "set", "duck", "main", "--burst", "5")
    assert (result.status, "burst 5 (was 20)" in result.out) == (0, True)
    assert "pushed again when Redis is available" in result.err
    [share] = await QuotaAdmin(database).subscriptions("duck")
    assert share.limits["int_burst"] == 500
    assert "as of the last reconciliation" in await show_cli("show info duck")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("show info duk", "There is no show 'duk': did you mean duck?"),
        ("show rename duk drake", "did you mean duck?"),
        ("show delete duk", "did you mean duck?"),
        ("show set-managed duk true", "did you mean duck?"),
        ("pool rename mian big", "There is no pool 'mian': did you mean main?"),
        ("pool delete mian", "did you mean main?"),
        ("sub list duk", "did you mean duck?"),
        ("sub create duk main --size 1 --burst 1", "did you mean duck?"),
        ("sub create duck mian --size 1 --burst 1", "did you mean main?"),
        ("sub set duck mian --burst 150%", "There is no subscription of show duck 'mian': did you mean main?"),
        ("sub delete duck mian", "did you mean main?"),
        ("folder list duk", "did you mean duck?"),
        ("folder create duk shots", "did you mean duck?"),
        ("folder set duck shot --max-cores 1", "did you mean shots?"),
        ("folder rename duck shot x", "did you mean shots?"),
        ("folder delete duck shot", "did you mean shots?"),
        ("dept list duk", "did you mean duck?"),
        ("dept add duck f", "did you mean fx?"),
        ("dept set duck f --max-cores 1", "did you mean fx?"),
        ("dept remove duck f", "did you mean fx?"),
        ("dept delete zzz", "There is no dept 'zzz': there are fx."),
        ("job set duck nope --max-cores 1", "There is no job with the id 'nope'"),
        ("job set duck 01a1df12-a169-76d5-8ada-2e4ab33199ac --max-cores 1", "The show duck has no job"),
        ("layer set duck 01a1df12-a169-76d5-8ada-2e4ab33199ac --max-cores 1", "The show duck has no layer"),
        ("show create duck", "The show duck already exists"),
        ("show create a:b", "'a:b' cannot be the name of a show"),
        ("sub create duck main --size 1 --burst 1", "The subscription main already exists"),
        ("sub set duck main --burst -5", "'-5' is not a valid amount of cores"),
        ("sub set duck main --burst -5%", "'-5%' is not a valid amount of cores"),
        ("sub set duck main --burst unlimited", "'unlimited' is not a valid amount of cores"),
        ("sub set duck main --size 0.001", "too precise"),
        ("sub set duck main --burst 33.333%", "'3.3333' cores are too precise"),
        ("sub set duck main --size 99999999999", "too many"),
        ("sub set duck main --size 21474836 --burst 101%", "too many"),
        ("sub set duck main --size 1e3", "'1e3' is not a valid amount of cores"),
        ("sub set duck main --size 2,5", "'2,5' is not a valid amount of cores"),
        ("sub set duck main --gpu-burst 1.5", "'1.5' is not a valid number of GPUs"),
        ("sub set duck main --gpu-burst -2", "-2 is not a valid number of GPUs"),
        ("sub set duck main --gpu-burst 99999999999", "is not a valid number of GPUs"),
        ("folder set duck shots --max-cores -2", "'-2' is not a valid limit in cores"),
        ("folder set duck shots --min-cores -1", "'-1' is not a valid amount of cores"),
        ("folder set duck shots --min-gpus unlimited", "is not a valid number of GPUs"),
        ("folder set duck shots --min-cores 5 --max-cores 4", "contradict each other"),
        ("sub set duck main", "There is nothing to change"),
        ("dept set duck fx", "There is nothing to change"),
        ("show set-managed duck maybe", "use one of true, false"),
        ("sub create duck main --size 1", "--burst is missing"),
    ],
)
async def test_invalid_quota_command_prints_one_error_and_changes_nothing(rota, show_cli, database, line, sentence):
    entries = await audit_entries(database)
    result = await rota(*line.split())
    assert (result.status, result.out) == (2, "")
    assert sentence in result.err
    assert await audit_entries(database) == entries


async def test_delete_of_quota_in_use_is_refused(show_cli, rota, database):
    await book(AccountingService(database, None), range(3))
    for line in ("show delete duck", "folder delete duck shots", "sub delete duck main", "dept remove duck fx"):
        result = await rota(*line.split())
        assert result.status == 1
        assert "cannot be deleted while 3 frames run on it: cancel its jobs or wait for them. [refused]" in result.err
    for line in ("pool delete main", "dept delete fx"):
        result = await rota(*line.split())
        assert (result.status, "(duck): delete those first. [refused]" in result.err) == (1, True)


async def test_control_characters_in_names_are_not_printed(rota, show_cli):
    result = await rota("show", "info", "\x1b[2Jduck")
    assert (result.status, "\x1b" in result.err) == (2, False)


@pytest.mark.parametrize("line", ["show list", "show create duck"])
async def test_missing_server_url_names_the_setting(rota, monkeypatch, line):
    monkeypatch.delenv("ROTA_REDIS_URL")
    result = await rota(*line.split())
    assert (result.status, "No Redis is configured: set redis.url" in result.err) == (2, True)
    monkeypatch.delenv("ROTA_POSTGRES_URL")
    result = await rota(*line.split())
    assert (result.status, "PostgreSQL is not configured: set postgres.url" in result.err) == (2, True)


async def test_missing_schema_error_names_the_migrate_command(rota, monkeypatch, empty_database_url):
    monkeypatch.setenv("ROTA_POSTGRES_URL", empty_database_url)
    result = await rota("show", "list")
    assert (result.status, "run `rota db migrate`" in result.err) == (1, True)


async def test_empty_lists_print_the_create_command(cli):
    for each in ("show", "pool", "dept"):
        assert f"`rota {each} create NAME`" in await cli(f"{each} list")
        assert await cli(f"{each} list --json") == "[]\n"


async def test_rota_process_prints_only_the_json_result(urls, spawn, tmp_path):
    """As a separate process, with default log settings."""
    process = await spawn(None, argv=[ROTA, "show", "create", "duck", "--managed", "--json"])
    out, err = await process.output(), await process.errors()
    assert (await process.wait(), err) == (0, "")
    assert json.loads(out)["after"]["managed"] is True


def test_help_imports_no_heavy_modules():
    script = (
        "import sys; from rota.cli.main import app; from typer.main import get_command; get_command(app);"
        "print(*{'asyncpg', 'grpc', 'redis', 'nats', 'rich', 'rota.accounting'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True).stdout == "\n"


GROUPS = {
    name.removesuffix("_app"): group
    for module in (quota_commands, cap_commands)
    for name, group in vars(module).items()
    if name.endswith("_app")
}


@pytest.mark.parametrize("group", GROUPS)
def test_quota_commands_have_help_and_json_output(group):
    for command in GROUPS[group].registered_commands:
        assert len(command.callback.__doc__) > 20, command.name
        assert "form" in command.callback.__annotations__, command.name


@pytest.mark.parametrize(
    ("used", "most", "size", "shown"),
    [
        (0, 100, 0, "░░░░░░░░░░░░░░░░│ 0 %"),
        (1, 100, 0, "█░░░░░░░░░░░░░░░│ 1 %"),
        (99, 100, 50, "████████│███████░ 99 %"),
        (100, 100, 100, "████████████████│ 100 %"),
        (130, 100, 25, "████│████████████ 130 %"),
        (50, 100, 200, "████████░░░░░░░░│ 50 %"),
        (5, 0, 0, "nothing may run"),
        (5, None, 0, ""),
    ],
)
def test_usage_bar_shows_usage_and_size(used, most, size, shown):
    assert usage_bar(used, most, size) == shown
