"""Directories in S3: whole or absent, checked byte by byte, and resumed where a kill ended them."""
