"""Placement on Ray Serve by public means only: deployments, one for each model and class of nodes, whose label
selectors never change, and an autoscaling policy of the application that sets how many replicas each has.

Modules: `nodes` (Ray's nodes as a cluster state, what replicas report of them, the names of deployments), `policy`
(what Serve's controller runs, and what a Serve configuration says), `gauges` (for `/metrics`).
"""
