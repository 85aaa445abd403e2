"""Infrastructure: artifacts, processes, distributed ranks, executors and object storage."""
