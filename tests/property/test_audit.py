"""However a superuser tampers with the audit log, `verify` names the first wrong entry.

The SQL function builds the chain and Python checks it, so every example also shows that both compute the same hashes.
"""

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rota.infra import audit
from rota.infra.audit import AuditEntry, ChainHead
from rota.infra.audit.chain import CHAIN_START, ChainRow, row_hash
from rota.infra.postgres.sql import parse_query

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
ENTRY = st.builds(AuditEntry, TEXT, TEXT.filter(len), TEXT, st.dictionaries(TEXT, JSON, max_size=3))
BATCHES = st.lists(st.lists(ENTRY, min_size=1, max_size=3), min_size=1, max_size=4)


def sql(text):
    return parse_query("test", f"-- Test.\n{text}")


CHANGES = {
    "at": sql("UPDATE rota.audit SET at = at + interval '1 microsecond' WHERE seq = $1"),
    "actor": sql("UPDATE rota.audit SET actor = actor || 'x' WHERE seq = $1"),
    "border": sql("UPDATE rota.audit SET actor = actor || left(action, 1), action = substr(action, 2) WHERE seq = $1"),
    "target": sql("UPDATE rota.audit SET target = 'x' || target WHERE seq = $1"),
    "detail": sql("""UPDATE rota.audit SET detail = detail || '{"x": {"y": 1.0}}' WHERE seq = $1"""),
    "prev_hash": sql("UPDATE rota.audit SET prev_hash = sha256(prev_hash) WHERE seq = $1"),
    "hash": sql("UPDATE rota.audit SET hash = sha256(hash) WHERE seq = $1"),
}
AS_ADMIN = sql("SET LOCAL session_replication_role = replica")
EMPTY = sql(
    "WITH gone AS (DELETE FROM rota.audit) UPDATE rota.audit_head SET seq = 0, hash = decode(repeat('00', 32), 'hex')"
)
ROWS = sql("SELECT seq, at, actor, action, target, detail::text, prev_hash, hash FROM rota.audit ORDER BY seq")
REMOVE = sql("DELETE FROM rota.audit WHERE seq = ANY ($1::bigint[])")
PUT = sql(
    "INSERT INTO rota.audit VALUES ($1, $2, $3, $4, $5, $6, $7, $8)"
    " ON CONFLICT (seq) DO UPDATE SET actor = $3, prev_hash = $7, hash = $8"
)
SET_HEAD = sql("UPDATE rota.audit_head SET seq = $1, hash = $2")


async def chain_of(database, batches):
    """A fresh chain of these batches; returns its rows and its head."""
    await tamper(database, (EMPTY,))
    head = CHAIN_START
    for batch in batches:
        async with database.transaction() as tx:
            head = await audit.append(tx, batch)
    return [ChainRow(*row) for row in await database.rows(ROWS)], head


async def tamper(database, *statements):
    """Run statements as only a superuser can: with triggers disabled."""
    async with database.transaction() as tx:
        await tx.run(AS_ADMIN)
        for statement, *args in statements:
            await tx.run(statement, *args)


def forged(rows, index):
    """`rows` from `index` on with another actor there and every hash recomputed: a consistent chain."""
    last, chain = rows[index].prev_hash, []
    for position, row in enumerate(rows[index:]):
        row = msgspec.structs.replace(row, prev_hash=last, actor=row.actor + "x" if position == 0 else row.actor)
        last = row_hash(row)
        chain.append(msgspec.structs.replace(row, hash=last))
    return chain


def put(row):
    return (PUT, *msgspec.structs.astuple(row))


with_database = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@with_database
@given(batches=BATCHES, change=st.sampled_from(sorted(CHANGES)), where=st.floats(0, 0.999))
async def test_changed_audit_entry_is_named(database, batches, change, where):
    rows, head = await chain_of(database, batches)
    assert (await audit.verify(database, anchor=head)).ok
    seq = rows[int(where * len(rows))].seq
    await tamper(database, (CHANGES[change], seq))
    report = await audit.verify(database)
    assert (report.problem.seq, report.problem.why) == (seq, "changed")
    assert report.checked == seq - 1


@with_database
@given(batches=BATCHES, data=st.data())
async def test_removed_audit_entries_are_detected(database, batches, data):
    rows, _ = await chain_of(database, batches)
    gone = data.draw(st.sets(st.sampled_from([row.seq for row in rows]), min_size=1))
    await tamper(database, (REMOVE, sorted(gone)))
    problem = (await audit.verify(database)).problem
    if any(row.seq > min(gone) and row.seq not in gone for row in rows):
        assert (problem.seq, problem.why) == (min(gone), "gap")
    else:
        assert (problem.seq, problem.why) == (min(gone) - 1, "wrong_head")


@with_database
@given(batches=BATCHES, where=st.floats(0, 0.999))
async def test_audit_entry_forged_with_a_valid_hash_does_not_match_the_next(database, batches, where):
    rows, _ = await chain_of(database, batches)
    index = int(where * len(rows))
    fake = forged(rows, index)[0]
    await tamper(database, put(fake))
    problem = (await audit.verify(database)).problem
    last = index == len(rows) - 1
    assert (problem.seq, problem.why) == ((fake.seq, "wrong_head") if last else (fake.seq + 1, "forked"))


@with_database
@given(batches=BATCHES, where=st.floats(0, 0.999))
async def test_audit_chain_rewritten_to_its_head_is_detected_by_an_external_anchor(database, batches, where):
    rows, head = await chain_of(database, batches)
    fakes = forged(rows, int(where * len(rows)))
    await tamper(database, *map(put, fakes), (SET_HEAD, fakes[-1].seq, fakes[-1].hash))
    assert (await audit.verify(database)).ok, "the chain is consistent"
    problem = (await audit.verify(database, anchor=head)).problem
    assert (problem.seq, problem.why) == (head.seq, "rewritten")


@with_database
@given(batches=BATCHES, where=st.floats(0, 0.999))
async def test_audit_chain_truncated_with_its_head_is_detected_by_an_external_anchor(database, batches, where):
    rows, head = await chain_of(database, batches)
    kept = int(where * len(rows))
    end = ChainHead(rows[kept - 1].seq, rows[kept - 1].hash) if kept else CHAIN_START
    await tamper(database, (REMOVE, [row.seq for row in rows[kept:]]), (SET_HEAD, end.seq, end.hash))
    assert (await audit.verify(database)).ok, "the chain is consistent"
    problem = (await audit.verify(database, anchor=head)).problem
    assert (problem.seq, problem.why) == (head.seq, "cut")
