-- The latest version of every workflow of the shows $1 (null: all), with its runs that have not ended.
SELECT DISTINCT ON (s.str_name, w.name) s.str_name AS show, w.version, w.spec,
       (SELECT count(*) FROM rota.workflow_run r JOIN rota.workflow o USING (pk_workflow)
        WHERE o.pk_show = w.pk_show AND o.name = w.name AND r.ts_ended IS NULL) AS runs
FROM rota.workflow w JOIN rota.show s USING (pk_show)
WHERE $1::uuid[] IS NULL OR s.pk_show = ANY ($1)
ORDER BY s.str_name, w.name, w.version DESC
