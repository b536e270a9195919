"""What a GPU must show before anything is said of one: `python -m plait_bench.gpu`. See `__main__`."""
