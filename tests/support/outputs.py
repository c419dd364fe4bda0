"""A replica that checks outputs, with rules that a test may change at any time."""

import msgspec

from rota.model.jobs.submission import LayerSpec, Submission
from rota.model.policy.outputs import OutputMeta
from rota.policy.output.evaluate import CompiledOutputPolicy
from rota.policy.output.rules import DEFAULT_RULES, OutputRules, OutputSection
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm
from tests.support.waiting import until

SECRET = "AKIA" + "ABCDEFGHIJKLMNOP"
SCANS = sql("SELECT count(*) FROM rota.scan")

LAYER = """
SELECT pk_show, layer FROM (
  SELECT j.pk_show, l.pk_layer AS layer FROM rota.job j JOIN rota.layer l USING (pk_job) WHERE j.pk_job = $2::uuid
  UNION ALL SELECT d.pk_show, d.layers[1].pk_layer FROM rota.job_done d WHERE d.pk_job = $2::uuid) AS found"""
ADD_END = sql(f"""
INSERT INTO rota.frame_end (pk_layer, frame, attempt, token, state, value, output)
SELECT layer, 0, 1, $1::bigint, 'SUCCEEDED', $3::bytea, 'quarantined' FROM ({LAYER}) AS of_job""")
ADD_OUTPUT = sql(f"""
INSERT INTO rota.output (token, pk_layer, frame, pk_job, pk_show, state, severity, rule, meta, ts_ended)
SELECT $1::bigint, layer, 0, $2::uuid, pk_show, 'quarantined', 'high', 'r', $3::bytea, now() - interval '1 minute'
FROM ({LAYER}) AS of_job""")


async def an_output(database, job, token):
    """Insert a quarantined output of a job; returns its id."""
    meta = OutputMeta(show="film", topic="default", layer="main")
    await database.run(ADD_END, token, job, msgspec.msgpack.encode("kept"))
    await database.run(ADD_OUTPUT, token, job, msgspec.msgpack.encode(meta))
    return str(token)


class OutputPolicyFarm(Farm):
    """A `Farm` that checks outputs; the rules may be changed at any time."""

    def __init__(self, *where, rules=DEFAULT_RULES, mode=None, topics=None, **more):
        super().__init__(*where, **more)
        enabled = msgspec.structs.replace(self.settings.output_policy, enabled=True)
        self.settings = msgspec.structs.replace(self.settings, output_policy=enabled)
        self.rules(rules, mode, topics)

    def rules(self, rules=DEFAULT_RULES, mode=None, topics=None):
        section = OutputSection(fail_mode=mode, topics=topics or {})
        self.policy = CompiledOutputPolicy(OutputRules(section=section, rules=tuple(rules)), snapshot="s1")

    async def server(self):
        replica = await super().server()
        replica.engine.finisher.outputs.policy = lambda: self.policy
        replica.engine.scanner.checker._policy = lambda: self.policy
        return replica

    async def scanned(self):
        await until(self._is_scanned, what="the end of all scans")

    async def _is_scanned(self):
        return await self.database.value(SCANS) == 0

    async def state(self, job, wanted):
        async def reached():
            row = await self.done(job)
            return row is not None and row["state"] == wanted

        await until(reached, what=f"job {job} {wanted}")

    async def submit_layers(self, *layers, show="film"):
        """Submit a job with one layer for each (task, *args)."""
        specs = tuple(
            LayerSpec(name=f"l{number}", task=task, input={"args": list(args), "kwargs": {}} if args else None)
            for number, (task, *args) in enumerate(layers)
        )
        (submitted,) = await self.submitter.submit([Submission(show=show, layers=specs)])
        return submitted.job
