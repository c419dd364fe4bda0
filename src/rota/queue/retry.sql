-- End claimed turns and queue their frames again $3 seconds from now; $4: an attempt was used.
SELECT claim_id, refused FROM rota.queue_retry(
  $1::bigint[], $2::varbit[], make_interval(secs => $3::float8), $4::boolean)
