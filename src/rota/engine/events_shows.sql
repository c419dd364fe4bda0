-- Every show with its name.
SELECT pk_show, str_name FROM rota.show
