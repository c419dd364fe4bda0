-- Cancel claimed turns.
SELECT claim_id, refused FROM rota.queue_cancel_running($1::bigint[], $2::varbit[])
