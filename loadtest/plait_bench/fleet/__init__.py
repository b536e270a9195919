"""Systems that run in worker processes of the benchmark: a workload is a list of items that the processes share."""
