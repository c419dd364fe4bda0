-- Those of the agents $1 that are known, with the group in whose sets they are.
SELECT a.name, a.shard_group FROM rota.agent a WHERE a.name = ANY ($1::text[])
