-- Let up to $2 parked turns of the job $1 be claimed again.
SELECT rota.queue_unpark($1::uuid, $2::bigint)
