"""Users' files: found by name or glob, opened as text, and read as rows from CSV, JSON lines and Parquet."""
