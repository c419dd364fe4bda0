-- Say whether servers ask a policy before jobs run.
UPDATE rota.policy_guard SET asks = $1::boolean WHERE asks <> $1::boolean
