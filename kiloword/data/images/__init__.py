"""From encoded images to augmented pixels, with limits on what a decoder may be asked."""
