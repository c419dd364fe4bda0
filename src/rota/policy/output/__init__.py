"""Output policy: whether the output of a frame may leave. Rules, scanners and their decisions.

rules             rules for outputs, and the built-in ones
loader            the sections `output_policy` and `output_rules` of a policy file
evaluate          decides by metadata first, then by content; redacts
patterns          what the scanners search for
scanning          bounded search for patterns
parts             value and files; files are read in chunks
text_extraction   the texts of an output, and their locations
checker           checks content in this process or at a remote kernel

Nothing here changes a job or performs I/O except `checker`: `rota.engine.outputs` carries out the decisions.
"""
