"""Labelled rows to token rows: readers, tables, features."""
