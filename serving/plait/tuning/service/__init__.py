"""Tuning jobs submitted over HTTP: the job queue, the job processes, the routes."""
