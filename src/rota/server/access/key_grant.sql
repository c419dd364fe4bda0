-- Grant key $1 the roles $2 in the shows $3, none of which is every show.
INSERT INTO rota.api_grant (key_id, role, pk_show, b_every)
SELECT $1::text, role, show, show IS NULL FROM unnest($2::text[], $3::uuid[]) AS given (role, show)
