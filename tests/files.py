"""Files as tests compare them."""

from pathlib import Path


def contents(directory: Path) -> dict[str, bytes]:
    """Returns the bytes of every file below a directory by its path there, hidden ones too."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
