"""CoCa, SyCoCa (arXiv:2401.02137) and VQA: presets, captioning, attentive masks, masked images, answering."""
