"""One tuning job: run, resumed, reported, applied."""
