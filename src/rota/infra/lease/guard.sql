-- Fail unless every grant still runs, and let a holder that is paused in this transaction block others for $3 ms at most.
SELECT rota.assert_fence(mine.name, mine.fence), set_config('idle_in_transaction_session_timeout', $3, true)
FROM (SELECT * FROM unnest($1::text[], $2::bigint[]) AS given (name, fence) ORDER BY name) AS mine
