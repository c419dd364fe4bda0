-- Make pending deltas part of the live counts, or fewer while somebody pins old rows.
SELECT turn, deltas, done FROM rota.queue_fold($1::boolean)
