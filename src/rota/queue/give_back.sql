-- Return claimed turns to their place, parked for the job $3 if there is one.
SELECT claim_id, refused FROM rota.queue_give_back($1::bigint[], $2::varbit[], $3::uuid)
