"""Configurations of the engine and of the recommender, measured cell by cell: what the tuner's library ships with, and
tables whose optimum is known.

``python -m plait_bench.cells WORKLOAD --out FILE`` measures every cell of the workload's space that the file lacks (in
the library's own format), so that it can be stopped and started again; ``--sample N`` takes N cells, ``--again N``
measures the N best twice more.
"""
