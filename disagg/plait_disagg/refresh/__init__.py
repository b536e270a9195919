"""Live refresh: new rows and new weights for a model that is being served, as updates with versions.

An *update* is a folder (`update.py`). It is checked whole (`check.py`), made ready beside what is served (`live.py`),
published to all workers in two phases (`publish.py`) and kept in the package's journal (`journal.py`), so that a worker
that starts later comes up with it. `fold.py` writes a package that has its updates inside.
"""
