"""Configurations of the diffusion engine and the ranker, measured cell by cell: the data of the tuner's shipped
library, and tables whose optimum is known.

`python -m plait_bench.cells WORKLOAD --out FILE` measures every cell of the workload's space that the file lacks (in
the library's own format), so that it can be stopped and restarted; `--sample N` takes N cells, `--again N` measures
the N best twice more.
"""
