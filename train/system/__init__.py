"""What machine this is, how this process was started, and where files lie: disk, S3, run folders. No torch here."""
