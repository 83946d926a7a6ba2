"""`kiloword quickstart`: train on drawn scenes, judge the model, write a report."""
