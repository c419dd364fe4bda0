"""`rota workflow`: definitions and runs of workflows. `load_file` reads definitions from YAML, JSON or Python."""
