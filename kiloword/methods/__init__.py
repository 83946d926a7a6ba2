"""The methods: `method.py` has their slots, `registry.py` their names; a paper that brings much has a folder."""
