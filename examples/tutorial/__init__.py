"""Six small measurements, each a page of `docs/tutorial`; run them as `python -m examples.tutorial.NAME`."""
