"""Text generation: search over next tokens, captions of images, answers to questions."""
