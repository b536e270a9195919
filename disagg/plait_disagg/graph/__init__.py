"""One model to two programs: capture, tile, cut, split, run. Import from the modules: a worker needs neither tracer
nor cutters.
"""
