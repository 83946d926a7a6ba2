"""From data sets to batches: sources, images, text, transforms of examples, sampler and loader."""
