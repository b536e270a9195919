"""Runs against a whole server, to be started by hand: processes that are killed, a tenant that floods or attacks, hours
of load.

`python -m tests.faults run|fairness|neighbours|refusals|steady` from the repository's root; "faults" in
loadtest/docs/benchmarks.md.
"""
