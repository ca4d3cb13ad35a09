"""Access to users' files: finding them, opening text, and reading the rows of CSV, JSON lines and Parquet."""
