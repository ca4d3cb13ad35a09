"""Folders on disk and in S3, files that are whole or absent, manifests, and checks of what comes from elsewhere."""
