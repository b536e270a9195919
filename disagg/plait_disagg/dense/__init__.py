"""How the dense half runs on a CPU: torch is the definition, prepared programs run where they are faster.

Chosen per bucket of batch sizes (`buckets.py`), by a trial on this host beside what is served (`trial.py`).
"""
