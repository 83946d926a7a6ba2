"""Data sets as `Source`s: tables, folders, one's own, questions, mixtures; `open.py` takes what a user wrote."""
