"""The command line: one file a verb. Nothing here imports torch before a verb runs, so that help is instant."""
