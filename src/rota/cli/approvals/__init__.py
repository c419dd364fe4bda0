"""`rota approvals`: lists, approves and rejects jobs and workflow steps that wait for an approval."""
