-- The queues of these places, made when they are new; null where the show, folder or department is not known.
SELECT g.at::integer AS at, rota.job_queue(
  g.show, g.folder, g.dept, g.digest, g.topic, ARRAY(SELECT jsonb_array_elements_text(g.requires)), g.labels,
  nullif(g.pool, ''), nullif(g.worker, ''), g.cores, g.gpus, g.memory_mb) AS queue
FROM unnest($1::text[], $2::text[], $3::text[], $4::bytea[], $5::text[], $6::jsonb[], $7::jsonb[], $8::text[],
            $9::text[], $10::bigint[], $11::int[], $12::bigint[]) WITH ORDINALITY
  AS g (show, folder, dept, digest, topic, requires, labels, pool, worker, cores, gpus, memory_mb, at)
ORDER BY g.show COLLATE "C", g.folder COLLATE "C", g.dept COLLATE "C", g.digest
