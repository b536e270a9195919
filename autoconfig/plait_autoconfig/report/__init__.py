"""Reports on tuning jobs: one HTML file that opens offline, and the comparison of several jobs."""
