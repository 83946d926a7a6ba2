"""Captions and questions in files as their authors distribute them: each becomes a table that `TableSource` reads."""
