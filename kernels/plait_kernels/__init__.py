"""Fused operators. `<op>/reference.py` is each operator's definition; `registry` chooses an implementation."""
