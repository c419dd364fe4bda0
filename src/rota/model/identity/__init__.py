"""Identity: who calls. `rota.model.access` says what they may do.

| module | subject |
|---|---|
| `principals` | people and services, the rules that compare them, claims of submitters without a key |
| `api_key_format` | the text of API keys: id, secret, check characters |
"""
