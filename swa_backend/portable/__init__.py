"""The portable attention provider: one Triton source for every GPU that Triton supports."""
