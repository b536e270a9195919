"""Placement on Ray Serve by public means only: deployments, one for each model and class of nodes, whose label
selectors never change, and an autoscaling policy of the application that sets how many replicas each has.

Modules: `declared` (what a Serve configuration says), `nodes` (Ray's nodes as a cluster state, what replicas report of
them, the names of deployments), `policy` (what Serve's controller runs), `gauges` (for `/metrics`).
"""
