-- Take every free lease among $1 for $2, for $3 seconds; $4 asks to be notified when a taken one is released.
SELECT name, fence, left_s FROM rota.lease_acquire($1::text[], $2::text, make_interval(secs => $3::float8), $4::boolean)
