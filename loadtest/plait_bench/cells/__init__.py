"""Configurations of the diffusion engine and the ranker, measured cell by cell: the data of the tuner's shipped
library, and tables whose optimum is known.

`python -m plait_bench.cells WORKLOAD --out FILE` measures every cell of the workload's space `--times` times, in
rounds, as far as the file (in the library's own format) lacks them: it can be stopped and started again.
"""
