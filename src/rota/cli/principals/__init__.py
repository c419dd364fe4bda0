"""`rota principals`: the people and services that API keys belong to."""
