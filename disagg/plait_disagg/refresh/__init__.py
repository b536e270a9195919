"""Live refresh: new rows and new weights for a model while it is being served, as versioned updates.

An *update* is a folder (`update.py`). It is checked as a whole (`check.py`), prepared beside what is being served
(`live_package.py`), published to all workers in two phases (`publish.py`) and kept in the package's journal
(`journal.py`), so that a worker that starts later includes it. `fold.py` writes a package with its updates folded
in.
"""
