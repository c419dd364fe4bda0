-- Raise the fence of show $1 for a Redis that has to be seeded; tells the new fence.
SELECT rota.show_found($1::uuid)
