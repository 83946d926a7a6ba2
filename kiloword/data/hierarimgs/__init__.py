"""HierarImgs: from an image set with instance masks to images of several levels (arXiv:2410.18857, appendix B.3)."""

from kiloword.data.hierarimgs.masks import decode_mask
from kiloword.data.hierarimgs.writer import Options, Report, build

__all__ = ["Options", "Report", "build", "decode_mask"]
