"""Looking inside a model: attention maps, mixing weights, Grad-CAM, reconstructions, and the sheets that show them."""
