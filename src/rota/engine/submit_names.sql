-- What shows, folders of the show $1 and departments there are, for a word about one that there is not.
SELECT 'show' AS kind, str_name AS name FROM rota.show
UNION ALL SELECT 'folder', f.str_name FROM rota.folder f JOIN rota.show s USING (pk_show) WHERE s.str_name = $1::text
UNION ALL SELECT 'dept', str_name FROM rota.dept
ORDER BY kind, name LIMIT 10000
