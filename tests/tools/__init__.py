"""Tools that make kernels testable without a GPU; see README.md beside this file."""
