"""Facts about the machine and the start of this process, and access to files on disk and in S3. It imports no torch."""
