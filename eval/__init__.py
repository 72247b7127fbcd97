"""Measuring: the command line, benchmarks, checks and reports."""
