"""The built-in data set: drawn scenes whose captions are logical queries, so that all matches are known exactly.

It has ground truth for false negatives, generality and hierarchy. `scenes-v1` is frozen.
"""
