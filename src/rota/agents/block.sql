-- The number of a block of run numbers, which nobody else gets.
SELECT nextval('rota.agent_run_block')
