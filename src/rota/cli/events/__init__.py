"""`rota events`: follows the event stream of the HTTP API."""
