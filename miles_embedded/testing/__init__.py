"""Doubles made of the embedded backend, and contract suites that need a model: for tests of formats and backends."""
