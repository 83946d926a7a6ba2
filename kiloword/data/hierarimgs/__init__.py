"""HierarImgs: from an image set with instance masks to images of several levels (arXiv:2410.18857, appendix B.3)."""

from kiloword.data.hierarimgs.masks import decode_mask
from kiloword.data.hierarimgs.writer import BuildOptions, BuildReport, build

__all__ = ["BuildOptions", "BuildReport", "build", "decode_mask"]
