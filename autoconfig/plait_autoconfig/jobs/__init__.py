"""Tuning jobs: from a job file to a recommendation that was measured twice, through crashes of anything.

The pieces, in the order in which a job meets them: `job_file` and `spec` (the file), `store` (the folder), `plan` (what
comes next, a pure function of what was measured), `loop` (does it), `runner` (a child process that measures), `state`
(what to tell people).
"""
