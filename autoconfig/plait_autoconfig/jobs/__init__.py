"""Tuning jobs: from a job file to a recommendation that was measured twice, surviving crashes of any part.

The pieces, in the order in which a job meets them: `job_file` and `spec` (what is asked), `store` (the file), `plan`
(decides what comes next, a pure function of the measurements), `loop` (does it), `runner` (a child process that
measures), `state` (what users see).
"""
