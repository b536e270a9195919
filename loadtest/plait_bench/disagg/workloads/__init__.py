"""The workloads of the benchmark, each a `plait_bench.benchmark.Workload`."""
