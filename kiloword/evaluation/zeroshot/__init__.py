"""The task `zeroshot`: classification by prompts, and which prompts of a class count."""
