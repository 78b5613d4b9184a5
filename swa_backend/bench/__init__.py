"""Measurements against a peer in the same run, for `swa-backend bench`. Nothing here is imported by the library."""
