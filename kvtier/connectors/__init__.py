"""Serving engines: each module knows one, and they know nothing of each other."""
