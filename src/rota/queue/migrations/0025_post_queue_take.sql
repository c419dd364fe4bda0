-- Replaced by a function that knows whether jobs take turns.
-- squawk-ignore ban-drop-function
DROP FUNCTION IF EXISTS rota.queue_take(integer, integer, bigint);
