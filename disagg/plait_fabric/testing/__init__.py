"""Conformance suites and peers for channels."""
