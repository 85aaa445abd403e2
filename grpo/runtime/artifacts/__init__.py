"""Reading and writing of artifacts: atomic, validated, byte-reproducible."""
