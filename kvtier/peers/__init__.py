"""The tier that is other hosts."""
