"""Models of other libraries: open_clip, transformers, the released ProLIP."""
