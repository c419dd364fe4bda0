-- Note checks $5 at the ends of frames, and let them be read that were held; each by layer, frame, token and day.
UPDATE rota.frame_end e SET output = nullif(e.output, 'held'), checks = coalesce(e.checks, '[]') || g.said
FROM unnest($1::uuid[], $2::integer[], $3::bigint[], $4::timestamptz[], $5::jsonb[]) AS g (layer, frame, token, ended, said)
WHERE e.pk_layer = g.layer AND e.frame = g.frame AND e.token = g.token AND e.ts_finished >= g.ended
