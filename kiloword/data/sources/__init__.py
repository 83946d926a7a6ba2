"""The former places of what users import."""
