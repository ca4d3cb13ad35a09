"""Files of users: found by name or glob, opened as text, and read as rows of CSV, JSON lines and Parquet."""
