-- Take at most $4 runs from members that are gone since $3 seconds, under the leader's lease $1 with fence $2.
SELECT s.name, s.run, s.due_ms, a.shard_group
FROM rota.agents_seize($1::text, $2::bigint, $3::float8, $4::integer) AS s JOIN rota.agent a ON a.name = s.name
