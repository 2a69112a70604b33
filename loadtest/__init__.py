"""Load generators, benchmarks and reports."""
