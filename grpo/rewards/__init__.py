"""One file per judge; judges are libraries. A judge that fails is a status, not a crash."""
