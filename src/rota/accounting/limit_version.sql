-- A version above all that were given to limits before.
SELECT nextval('rota.limit_version')
