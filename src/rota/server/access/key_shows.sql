-- Every show by name, for grants.
SELECT str_name AS name, pk_show AS id FROM rota.show ORDER BY str_name
