-- What shows $1 are called.
SELECT pk_show, str_name FROM rota.show WHERE pk_show = ANY ($1::uuid[])
