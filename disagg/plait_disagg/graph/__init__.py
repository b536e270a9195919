"""From one model to two programs: capture, tile, cut, split, run.

Import from the submodules: a worker needs neither the tracer nor the cutters.
"""
