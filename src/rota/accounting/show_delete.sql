-- Remove show $1 with its subscriptions, folders and points.
DELETE FROM rota.show WHERE pk_show = $1::uuid
