"""Runs against a whole server, to be started by hand: processes that are killed, a tenant that floods, hours of load.

`python -m tests.faults run|fairness|refusals|steady` from the repository's root; serving/README.md, "Under faults".
"""
