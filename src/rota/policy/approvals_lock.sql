-- Keep others from deciding approval $1 until the transaction ends.
SELECT pk_approval FROM rota.approval WHERE pk_approval = $1::uuid FOR UPDATE
