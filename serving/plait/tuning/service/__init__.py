"""Tuning jobs that come over HTTP: the queue of jobs, their process, their routes."""
