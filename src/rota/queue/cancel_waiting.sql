-- Cancel what waits of the job $1, in the layer $2 or all, from frame $3 to frame $4.
SELECT rota.queue_cancel_waiting($1::uuid, $2::uuid, $3::int, $4::int)
