-- Every dept.
SELECT pk_dept AS id, str_name AS name, int_version AS version FROM rota.dept ORDER BY str_name
