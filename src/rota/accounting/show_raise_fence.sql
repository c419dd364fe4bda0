-- Refuse every insert of show $1 that was booked in Redis before now; tells the new fence.
SELECT rota.show_raise_fence($1::uuid)
