-- Make show $1 named $2, managed or not ($3).
INSERT INTO rota.show (pk_show, str_name, b_scheduler_managed) VALUES ($1::uuid, $2, $3)
