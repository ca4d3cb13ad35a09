"""From labelled rows to token rows: readers, tables, features."""
