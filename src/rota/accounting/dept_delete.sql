-- Remove dept $1.
DELETE FROM rota.dept WHERE pk_dept = $1::uuid
