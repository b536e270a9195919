"""The requests waiting at a worker: order, forecast, batches, windows, and the signals that scale it."""
