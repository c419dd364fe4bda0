"""The books as an operator types them: shows, pools, shares and caps."""

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
TRAIL = sql("SELECT actor, action, target, detail FROM rota.audit ORDER BY seq")


@pytest.fixture
def urls(monkeypatch, tmp_path, database_url, redis_url):
    """What the command finds in its environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROTA_POSTGRES_URL", database_url)
    monkeypatch.setenv("ROTA_REDIS_URL", redis_url)


@pytest.fixture
def rota(monkeypatch, capsys, urls):
    """Runs `rota …` in this process and tells its status, its output and its errors."""

    async def run(*words):
        monkeypatch.setattr(sys, "argv", ["rota", *words])
        status = await asyncio.to_thread(_status)
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        assert "This should not happen" not in said.err, said.err
        return SimpleNamespace(status=status, out=said.out, err=said.err)

    return run


def _status():
    """In a thread, because the command has an event loop of its own."""
    try:
        main()
    except SystemExit as ended:
        return ended.code
    return 0


@pytest.fixture
def type_(rota):
    """Types a line that must be accepted; gives what it prints."""

    async def run(line):
        said = await rota(*line.split())
        assert said.status == 0, said.err
        return said.out

    return run


@pytest.fixture
async def farm(type_, database):
    """A show with a share, a folder and a department; types lines like `type_`."""
    admin = QuotaAdmin(database)
    await admin.create_show("duck", actor="ann")
    await admin.create_pool("main", actor="ann")
    await admin.create_dept("fx", actor="ann")
    await admin.create_subscription("duck", "main", size=10, burst=20, actor="ann")
    await admin.create_folder("duck", "shots", actor="ann")
    await admin.create_point("duck", "fx", actor="ann")
    return type_


async def book(books, tokens, *, cores=100, gpus=0, show="duck"):
    admin = books.admin
    [share], [folder], [point] = await admin.subscriptions(show), await admin.folders(show), await admin.points(show)
    found = await admin.show(show)
    charge = Charge(share.id, folder.id, found.id, found.id, point.id, cores, gpus)
    [outcome] = await books.book(found.id, [BookingGroup(charge, uuid4(), tokens)])
    assert list(outcome.booked) == list(tokens)


async def trail(database):
    return [(row["actor"], row["action"], row["target"]) for row in await database.rows(TRAIL)]


def words(text):
    """Its lines without the padding of tables."""
    return [" ".join(line.split()) for line in text.splitlines()]


async def test_an_operator_sets_up_a_show_and_sees_what_it_may_use(type_, database):
    assert await type_("show create duck") == "Created show duck; accounting in PostgreSQL.\n"
    assert "no subscription, so none of its jobs can run: `rota sub create duck" in await type_("show info duck")
    assert await type_("pool create main") == "Created pool main.\n"
    made = await type_("sub create duck main --size 100 --burst 150%")
    assert made == "Created subscription main of show duck: size 100, burst 150, GPU burst unlimited.\n"
    await type_("folder create duck shots --max-cores 64 --max-gpus 4")
    await type_("dept create fx")
    await type_("dept add duck fx --min-cores 0.5 --max-cores 20")
    await book(AccountingService(database, None), range(25), cores=50, gpus=0)
    info = words(await type_("show info duck"))
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
    assert words(await type_("show list"))[1] == f"duck PostgreSQL {show.fence} 100 150 12.5 █░░░░░░░░░│░░░░░░ 8 %"
    assert words(await type_("pool list"))[1] == "main 100 150 12.5 duck"
    assert words(await type_("dept list"))[1] == "fx duck"
    assert words(await type_("sub list duck")) == info[2:4]
    assert words(await type_("folder list duck")) == info[5:7]
    assert words(await type_("dept list duck")) == info[8:10]


async def test_programs_get_the_same_as_json(farm, database):
    await farm("sub set duck main --size 2.5 --gpu-burst 3")
    await farm("folder set duck shots --max-cores 0.29")
    info = json.loads(await farm("show info duck --json"))
    [share] = info["subscriptions"]
    assert share.items() >= {"name": "main", "size": 2.5, "burst": 20, "gpu_burst": 3, "used_cores": 0}.items()
    assert (info["folders"][0]["max_cores"], info["folders"][0]["max_gpus"]) == (0.29, -1)
    assert (info["managed"], info["use_is_live"], info["depts"][0]["name"]) == (False, True, "fx")
    assert json.loads(await farm("sub list duck --json")) == info["subscriptions"]
    assert json.loads(await farm("folder list duck --json")) == info["folders"]
    assert json.loads(await farm("dept list duck --json")) == info["depts"]
    [show], [pool], [dept] = [json.loads(await farm(f"{each} list --json")) for each in ("show", "pool", "dept")]
    assert (show["name"], show["size"], pool["shows"], dept["shows"]) == ("duck", 2.5, ["duck"], ["duck"])
    change = json.loads(await farm("sub set duck main --size 30 --json"))
    assert (change["changed"], change["before"]["size"], change["after"]["size"]) == (True, 2.5, 30)
    assert len(change["notes"]) == 1
    assert json.loads(await farm("sub set duck main --size 30 --json"))["changed"] is False


@pytest.mark.parametrize(
    ("line", "told"),
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
async def test_a_change_tells_what_is_there_now_and_what_was(farm, line, told):
    assert f": {told}.\n" in await farm(line)


async def test_what_is_shown_as_unlimited_can_be_typed_so(farm):
    await farm("folder set duck shots --max-cores 5 --max-gpus 5")
    told = await farm("folder set duck shots --max-cores unlimited --max-gpus unlimited")
    assert "max cores unlimited (was 5), max GPUs unlimited (was 5)" in told
    await farm("folder set duck shots --max-cores 5")
    assert "max cores unlimited (was 5)" in await farm("folder set duck shots --max-cores -1")


async def test_a_cap_below_what_is_used_is_set_and_says_what_to_expect(farm, database):
    await book(AccountingService(database, None), range(8), gpus=1)
    assert "8 cores are in use, above this limit: they continue" in await farm("sub set duck main --burst 7.5")
    assert "in use" not in await farm("sub set duck main --burst 8")
    assert "8 GPUs are in use" in await farm("dept set duck fx --max-gpus 1")
    assert words(await farm("dept list duck"))[1].endswith("8 of 1")


async def test_a_size_above_the_burst_is_told(farm):
    assert "Its size is above its burst" in await farm("sub set duck main --size 21")
    assert "Its size" not in await farm("sub set duck main --size 20")


async def test_nothing_changed_is_told_and_not_in_the_trail(farm, database):
    entries = await trail(database)
    assert (await farm("sub set duck main --burst 20")).startswith("Nothing changed: subscription main of show duck")
    assert (await farm("show set-managed duck false")).startswith(
        "Nothing changed: the accounting of show duck is already in PostgreSQL"
    )
    assert await trail(database) == entries


async def test_every_change_is_in_the_trail_in_the_name_of_the_os_user(farm, database, monkeypatch):
    monkeypatch.setenv("USER", "mallory")
    monkeypatch.setenv("LOGNAME", "mallory")
    await book(AccountingService(database, None), [1])
    show = await QuotaAdmin(database).show("duck")
    began = len(await trail(database))
    for line in (
        "sub set duck main --burst 30",
        "folder set duck shots --max-cores 3",
        "dept set duck fx --max-cores 3",
        f"job set duck {show.id} --max-cores 2",
        f"layer set duck {show.id} --max-gpus 2",
        "show set-managed duck true",
        "show set-managed duck false",
    ):
        await farm(line)
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
        await farm(line)
    found = (await trail(database))[began:]
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


async def test_the_books_change_hands_both_ways(farm):
    assert await farm("show set-managed duck true") == "The accounting of show duck is now in Redis.\n"
    assert "the accounting of show duck is already in Redis" in await farm("show set-managed duck TRUE")
    assert words(await farm("show list"))[1].startswith("duck Redis ")
    assert await farm("show set-managed duck false") == "The accounting of show duck is now in PostgreSQL.\n"
    assert await farm("show create goose --managed") == "Created show goose; accounting in Redis.\n"


async def test_what_a_managed_show_uses_is_told_as_redis_counts_it(farm, database, redis):
    await farm("show set-managed duck true")
    await book(AccountingService(database, redis), range(5))
    assert words(await farm("sub list duck")) == [
        "pool size burst used of burst GPUs",
        "main 10 20 5 ████░░░░│░░░░░░░░ 25 % 0 of unlimited",
    ]
    await redis.flushdb()
    assert words(await farm("sub list duck"))[-1] == "Usage is as of the last reconciliation: Redis does not answer."
    assert json.loads(await farm("show info duck --json"))["use_is_live"] is False


async def test_a_change_stands_when_redis_is_away_and_says_that_it_is(farm, rota, monkeypatch, database):
    await farm("show set-managed duck true")
    monkeypatch.setenv("ROTA_REDIS_URL", "redis://127.0.0.1:1")
    said = await rota("sub", "set", "duck", "main", "--burst", "5")
    assert (said.status, "burst 5 (was 20)" in said.out) == (0, True)
    assert "pushed again when Redis is available" in said.err
    [share] = await QuotaAdmin(database).subscriptions("duck")
    assert share.limits["int_burst"] == 500
    assert "as of the last reconciliation" in await farm("show info duck")


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
async def test_what_makes_no_sense_is_refused_in_a_sentence_and_changes_nothing(rota, farm, database, line, sentence):
    entries = await trail(database)
    said = await rota(*line.split())
    assert (said.status, said.out) == (2, "")
    assert sentence in said.err
    assert await trail(database) == entries


async def test_nothing_that_frames_run_on_is_deleted(farm, rota, database):
    await book(AccountingService(database, None), range(3))
    for line in ("show delete duck", "folder delete duck shots", "sub delete duck main", "dept remove duck fx"):
        said = await rota(*line.split())
        assert said.status == 1
        assert "cannot be deleted while 3 frames run on it: cancel its jobs or wait for them. [refused]" in said.err
    for line in ("pool delete main", "dept delete fx"):
        said = await rota(*line.split())
        assert (said.status, "(duck): delete those first. [refused]" in said.err) == (1, True)


async def test_control_characters_in_a_name_do_not_reach_the_terminal(rota, farm):
    said = await rota("show", "info", "\x1b[2Jduck")
    assert (said.status, "\x1b" in said.err) == (2, False)


@pytest.mark.parametrize("line", ["show list", "show create duck"])
async def test_without_servers_it_says_what_to_set(rota, monkeypatch, line):
    monkeypatch.delenv("ROTA_REDIS_URL")
    said = await rota(*line.split())
    assert (said.status, "No Redis is configured: set redis.url" in said.err) == (2, True)
    monkeypatch.delenv("ROTA_POSTGRES_URL")
    said = await rota(*line.split())
    assert (said.status, "PostgreSQL is not configured: set postgres.url" in said.err) == (2, True)


async def test_a_missing_schema_is_told_with_the_command_that_makes_it(rota, monkeypatch, empty_database_url):
    monkeypatch.setenv("ROTA_POSTGRES_URL", empty_database_url)
    said = await rota("show", "list")
    assert (said.status, "run `rota db migrate`" in said.err) == (1, True)


async def test_empty_books_say_how_to_begin(type_):
    for each in ("show", "pool", "dept"):
        assert f"`rota {each} create NAME`" in await type_(f"{each} list")
        assert await type_(f"{each} list --json") == "[]\n"


async def test_the_command_itself_answers_with_nothing_but_its_answer(urls, spawn, tmp_path):
    """Not in this process: as a person starts it, with logs as they are set by default."""
    process = await spawn(None, argv=[ROTA, "show", "create", "duck", "--managed", "--json"])
    out, err = await process.output(), await process.errors()
    assert (await process.wait(), err) == (0, "")
    assert json.loads(out)["after"]["managed"] is True


def test_help_answers_before_anything_heavy_is_imported():
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
def test_every_command_says_what_it_is_for_and_can_print_json(group):
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
def test_a_bar_shows_use_of_the_limit_and_where_the_size_ends(used, most, size, shown):
    assert usage_bar(used, most, size) == shown
