"""Upload and download of directories in S3: atomic, checksummed and resumable."""
