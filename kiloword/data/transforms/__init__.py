"""Transforms: changes of an example that see the whole data set (`kiloword.types.Transform`)."""
