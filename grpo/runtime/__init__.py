"""Files, processes, ranks, executors and storage: what runs below the methods."""
