"""What is told about a tuning job: one HTML file that opens offline, and the comparison of several jobs."""
