"""Webdataset tars as map-style data sets: headers, indexes, catalogues, shards."""
