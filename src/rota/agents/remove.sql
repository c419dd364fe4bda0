-- Forget an agent and its history. A run of it ends without an effect.
DELETE FROM rota.agent WHERE name = $1
