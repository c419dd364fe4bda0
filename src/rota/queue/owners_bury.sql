-- Declare owners dead whose lease has ended; all dead ones.
SELECT owner FROM rota.queue_bury_owners() AS owner
