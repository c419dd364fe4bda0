-- Give the books of show $1 to Redis ($2 true) or to PostgreSQL alone, with a new fence.
SELECT was, fence, version FROM rota.show_set_managed($1::uuid, $2::boolean)
