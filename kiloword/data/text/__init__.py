"""From captions to packed tokens: tokenizers, cleaning, choice of captions, augmentation."""
