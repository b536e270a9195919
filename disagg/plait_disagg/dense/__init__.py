"""How the dense half runs: torch is the definition.

On a CPU prepared programs run where they are faster, chosen per bucket of batch sizes by a trial on this host, beside
what is served (`trial.py`). On a GPU each bucket is a graph.
"""
