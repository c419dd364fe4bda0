"""`rota keys`: API keys and their grants."""
