-- The last entry of the audit trail.
SELECT seq FROM rota.audit_head
