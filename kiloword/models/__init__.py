"""Atomic files, locks, model folders and resumable states.

A state is `state/step-N/` with one safetensors file per rank, and `state/step-N.json` with numbers and checksums. The
JSON is written last: without it the state does not exist. The files have the format of `HuggingFaceStorageWriter` of
`torch.distributed.checkpoint` with `save_distributed=True`, so its reader and planner load them on any number of ranks,
sharded or not.
"""
