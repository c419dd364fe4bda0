"""May it run, may its output leave: rules in a file, who decides by them, and who asks.

Nothing is imported here: gRPC, CEL and RE2 are paid for by those who use them.
"""
