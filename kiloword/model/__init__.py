"""The model: towers, decoders, pooling and heads."""
