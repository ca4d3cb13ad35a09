"""Facts about the machine and how this process was started, and access to files on disk and in S3. No torch here."""
