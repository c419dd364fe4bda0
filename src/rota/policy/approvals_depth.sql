-- How many approvals are pending, by kind.
SELECT k.kind, (SELECT count(*) FROM rota.approval a WHERE a.state = 'pending' AND a.kind = k.kind) AS pending
FROM unnest(ARRAY['job', 'step']) AS k (kind)
