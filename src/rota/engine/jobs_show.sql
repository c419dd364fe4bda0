-- The id of the show called $1.
SELECT pk_show FROM rota.show WHERE str_name = $1::text
