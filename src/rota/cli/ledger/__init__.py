"""`rota ledger`: audits and repairs quota accounting, and shows live usage."""
