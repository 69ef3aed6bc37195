"""Conformance kits: what a new tier, codec, index, eviction policy or session must pass.

Subclass a kit in a test file, give it the fixture that it names, and pytest runs every law against yours.
"""
