"""Placement on a Ray of several nodes on this machine: logical GPUs, replicas that do nothing."""
