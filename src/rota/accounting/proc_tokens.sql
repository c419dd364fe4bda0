-- Tokens of the procs of show $1 from $2 to $3, in order, as one array.
SELECT ARRAY(
  SELECT token FROM rota.proc WHERE token BETWEEN $2::bigint AND $3::bigint AND pk_show = $1::uuid ORDER BY token
)
