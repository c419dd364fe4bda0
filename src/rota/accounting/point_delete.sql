-- Take department $2 out of show $1.
DELETE FROM rota.point WHERE pk_show = $1::uuid AND pk_dept = $2::uuid
