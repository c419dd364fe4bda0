"""May its output leave: rules, scanners and what they say, and the queue of outputs that must be looked into.

Nothing here touches a job: `rota.engine.outputs.sync_check` carries out what is said.
"""
