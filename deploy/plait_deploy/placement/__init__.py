"""Which node a replica goes to, so that fractions of GPUs strand little: state, scores, policies, simulator, planner.

Imports numpy and nothing else of plait. Symbols, after "Beware of Fragmentation" (FGD, USENIX ATC 2023): node n with
free CPU c_n (milli-cores) and per-device free GPU R_{n,g} (milli-GPUs, 0 to 1000); task class m with CPU D_m, k_m GPUs,
d_m milli-GPUs of each, and popularity p_m.
"""
